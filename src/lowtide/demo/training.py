"""Trains a small Qwen3-VL with LoRA and random weights on the emulated accelerator, in three ways.

The batch is one picture and a text that can be learned, both made here. An `Outcome` says how a few steps went.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

import lowtide
from lowtide import simdevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

POLICY = "recompute+offload"

LAYERS, TOKENS = 12, 768

_IMAGE, _START, _END, _VOCABULARY = 250, 252, 253, 256

_GRID = (1, 16, 16)
"""Frames, rows and columns of patches in the picture."""

_PATCH = 3 * 2 * 4 * 4
"""Numbers in one patch: colours, frames, rows and columns of pixels."""

_MERGED = 4
"""How many patches become one token."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """How one way of training went."""

    losses: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    milliseconds: float = 0.0
    """How long one step took, on the device's clock."""
    error: str = ""
    report: str = ""


def plain() -> tuple[nn.Module, None]:
    """Build the model and leave it as it is."""
    return build(), None


def their_flag() -> tuple[nn.Module, None]:
    """Build the model with transformers' own flag on, which calls torch's checkpoint."""
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model, None


def ours() -> tuple[nn.Module, lowtide.Applied]:
    """Build the model with Lowtide: regions are recomputed, and their inputs wait in pinned host memory."""
    model = build()
    return model, lowtide.apply(model, POLICY)


def train(make: Callable[[], tuple[nn.Module, lowtide.Applied | None]], steps: Iterable[int]) -> Outcome:
    """Train with AdamW on the device, until the steps are done or its memory runs out."""
    model, applied = make()
    model.to("sim")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-2)
    batch = {name: tensor.to("sim") for name, tensor in make_batch().items()}
    simdevice.reset()
    outcome = Outcome()
    try:
        for _ in steps:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.item())
    except torch.OutOfMemoryError as error:
        outcome.error = str(error)
    stats = simdevice.stats()
    outcome.peak_bytes = stats.peak_bytes
    outcome.milliseconds = stats.time * 1e3 / max(1, len(outcome.losses))
    outcome.report = str(applied.report()) if applied else ""
    return outcome


def build() -> nn.Module:
    """Build the model: a frozen base, embeddings and vision tower included, with LoRA on all linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": _VOCABULARY, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "use_cache": False,
        "rope_theta": 10000.0, "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]},
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 128, "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=_IMAGE,
        video_token_id=_IMAGE + 1,
        vision_start_token_id=_START,
        vision_end_token_id=_END,
        tie_word_embeddings=False,
    )
    lora = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    model = Qwen3VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]
    return get_peft_model(model, lora).train()


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    """Make one picture and a text that can be learned; its length differs from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.tensor([_GRID])
    patches = int(grid.prod())
    text = torch.arange(TOKENS - 16 * seed) * 7 % 97
    picture = torch.full((patches // _MERGED,), _IMAGE)
    ids = torch.cat([torch.tensor([_START]), picture, torch.tensor([_END]), text])[None]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids >= _IMAGE, -100),
        "pixel_values": torch.randn(patches, _PATCH, generator=generator),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == _IMAGE).long(),
    }
