"""Models of the sections, small and with random weights; nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    TinyModel = tuple[PreTrainedModel, dict[str, torch.Tensor]]


def llama(*, layers: int, width: int, tokens: int) -> TinyModel:
    """A few classes only: the head's logits shall not hide what the layers hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    ids = torch.randint(0, width, (1, tokens))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def qwen3(*, layers: int, width: int, tokens: int, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Heads of 32, one of keys for four of queries, and a vocabulary so small that the loss shows nothing."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=max(1, width // 128),
        head_dim=32,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    ids = torch.randint(0, 512, (1, tokens))
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
    return model.train(), {"input_ids": ids, "labels": ids}


def llama4_vision(*, layers: int, width: int, tokens: int) -> TinyModel:
    """Its layers are given their hidden state as a keyword. Patches stand for tokens; a class token joins them."""
    from transformers import Llama4VisionConfig, Llama4VisionModel

    torch.manual_seed(0)
    side = round(tokens**0.5)
    config = Llama4VisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=4 * side,
        patch_size=4,
        projector_input_dim=width,
        projector_output_dim=width,
        vision_output_dim=width,
        pixel_shuffle_ratio=0.5,
    )
    return Llama4VisionModel(config).train(), {"pixel_values": torch.randn(1, 3, 4 * side, 4 * side)}
