"""Builds the models of the self-test, small and with random weights, with batches that train all of their parts.

Four of them are judged for right gradients: text, pictures, experts, and a tower whose blocks take keywords. A fifth,
the `workload`, is a Llama of the bench's size, whose memory and time are measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.randomness import seeded, seeded_like
from lowtide.targets.job import DTYPES

if TYPE_CHECKING:
    from lowtide.selftest.bench import Work

Batch = dict[str, torch.Tensor]

TOKENS = 96
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "use_cache": False,
}
_PICTURE, _START, _END = 250, 252, 253
_GRID = (1, 8, 8)
_PATCH = 3 * 2 * 4 * 4


def build(family: str, *, lora: bool = False) -> tuple[nn.Module, Batch]:
    """Build the model of a family on the CPU, and a batch for it; the same numbers each time."""
    with seeded(0):
        model, batch = _BUILDERS[family]()
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=_ADAPTED[family]))
        return model.train(), batch


def _llama() -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_TEXT)), _text()  # type: ignore[no-untyped-call]


def _mixtral() -> tuple[nn.Module, Batch]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_TEXT, num_local_experts=4, output_router_logits=True)
    return MixtralForCausalLM(config), _text()  # type: ignore[no-untyped-call]


def _qwen3_vl() -> tuple[nn.Module, Batch]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=_PICTURE,
        video_token_id=_PICTURE + 1,
        vision_start_token_id=_START,
        vision_end_token_id=_END,
        tie_word_embeddings=False,
    )
    return Qwen3VLForConditionalGeneration(config), _text_with_picture()  # type: ignore[no-untyped-call]


def _vision() -> tuple[nn.Module, Batch]:
    return VisionTower(), {"pixels": torch.randn(2, 48, 64), "bias": torch.randn(48, 64)}


_BUILDERS = {"llama": _llama, "qwen3-vl": _qwen3_vl, "mixtral": _mixtral, "vision": _vision}
FAMILIES = tuple(_BUILDERS)

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ADAPTED: dict[str, Any] = {
    "llama": "all-linear",
    "qwen3-vl": "all-linear",
    "mixtral": _ATTENTION,
    "vision": ["query_key_value", "output"],
}
"""The layers that LoRA adapts."""


def _text() -> Batch:
    ids = (torch.arange(2 * TOKENS) * 7 % 97).reshape(2, TOKENS)
    return {"input_ids": ids, "labels": ids.clone()}


def _text_with_picture() -> Batch:
    frames, rows, columns = _GRID
    patches = frames * rows * columns
    picture = torch.full((patches // 4,), _PICTURE)
    text = torch.arange(TOKENS) * 7 % 97
    ids = torch.cat([torch.tensor([_START]), picture, torch.tensor([_END]), text])[None]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids >= _PICTURE, -100),
        "pixel_values": torch.randn(patches, _PATCH),
        "image_grid_thw": torch.tensor([_GRID]),
        "mm_token_type_ids": (ids == _PICTURE).long(),
    }


class VisionBlock(nn.Module):
    """A block that takes all of its tensors by keyword, as many vision towers call theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width))

    def forward(self, *, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.norm1(hidden + bias)).unflatten(-1, (3, 4, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.output(seen.transpose(1, 2).flatten(2))
        out: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return out


class VisionTower(nn.Module):
    """A tower of blocks that is no model of transformers."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(VisionBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, pixels: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(pixels)
        for block in self.blocks:
            hidden = block(hidden=hidden, bias=bias)
        out: torch.Tensor = self.head(hidden).square().mean()
        return out


def workload_config(work: Work) -> Any:
    """Return the configuration of the model whose memory and time are measured."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=work.hidden,
        intermediate_size=work.hidden * 11 // 4,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.key_value_heads,
        vocab_size=work.vocabulary,
        max_position_embeddings=work.tokens,
        use_cache=False,
        tie_word_embeddings=False,
    )


def workload(work: Work, device: torch.device) -> tuple[nn.Module, Batch]:
    """Build the model whose memory and time are measured, with its batch, on the device."""
    from transformers import AutoModelForCausalLM

    with seeded_like(0, torch.empty(0, device=device)), device:
        model = AutoModelForCausalLM.from_config(workload_config(work), dtype=DTYPES[work.dtype])  # type: ignore[no-untyped-call]
    ids = (torch.arange(work.tokens, device=device) % (work.vocabulary - 16) + 16)[None]
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    return model.train(), batch
