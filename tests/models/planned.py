"""Small models of the families that the simulator is judged on, with batches: real on a device, or blank on meta."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

CONFIG = transformers.LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=16000,
    tie_word_embeddings=False,
)
"""A larger one, of which plans are made through the public function."""
FAMILIES = ("llama", "qwen3", "qwen3_vl", "mixtral", "t5")
TOKENS = 256
_TEXT = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "use_cache": False, "vocab_size": 2048}
_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
_VISION_TOKENS = {
    "image_token_id": 2040,
    "video_token_id": 2041,
    "vision_start_token_id": 2042,
    "vision_end_token_id": 2043,
}


def _config(family: str) -> Any:
    if family == "llama":
        return transformers.LlamaConfig(**_TEXT, **_HEADS)
    if family == "qwen3":
        return transformers.Qwen3Config(**_TEXT, **_HEADS)
    if family == "mixtral":
        return transformers.MixtralConfig(**_TEXT, **_HEADS, num_local_experts=4, output_router_logits=True)
    if family == "t5":
        return transformers.T5Config(
            d_model=192,
            d_ff=512,
            num_layers=3,
            num_heads=6,
            d_kv=32,
            vocab_size=2048,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [8, 4, 4]}
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 192,
        "deepstack_visual_indexes": [0, 1],
    }
    return transformers.Qwen3VLConfig(
        text_config={**_TEXT, **_HEADS, "rope_parameters": rope}, vision_config=vision, **_VISION_TOKENS
    )


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "t5": "T5ForConditionalGeneration",
}


def make_model(family: str, dtype: torch.dtype, *, lora: bool, device: str) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            cls = getattr(transformers, _CLASSES[family])
            kernel = "sdpa" if cls._supports_sdpa else "eager"
            model: nn.Module = cls._from_config(_config(family), attn_implementation=kernel, dtype=dtype)
            if lora:
                names = ["q", "v"] if family == "t5" else ["q_proj", "v_proj"]
                model = get_peft_model(model, LoraConfig(r=4, target_modules=names))
    finally:
        torch.set_default_dtype(before)
    return model


def batch_maker(family: str, dtype: torch.dtype) -> Callable[[nn.Module, Any], dict[str, Any]]:
    """The same batch for a real run and for a simulated one."""

    def make(_model: nn.Module, device: Any) -> dict[str, Any]:
        ids = torch.arange(TOKENS, device=device).remainder(1000).add(5).reshape(1, TOKENS)
        if family != "qwen3_vl":
            return {"input_ids": ids, "labels": ids.clone()}
        ids[:, 1:17] = _VISION_TOKENS["image_token_id"]
        kinds = torch.zeros_like(ids)
        kinds[:, 1:17] = 1
        return {
            "input_ids": ids,
            "labels": ids.clone(),
            "mm_token_type_ids": kinds,
            "pixel_values": torch.zeros(64, 3 * 2 * 16 * 16, dtype=dtype, device=device),
            "image_grid_thw": torch.tensor([[1, 8, 8]], device=device),
        }

    return make
