"""The words of policies: our own, and those that people know from other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidValueError
from lowtide.spelling import unknown

if TYPE_CHECKING:
    Fields = dict[str, Any]
    """What a word or a setting says: some of a policy's fields. Rules are `overrides`, pairs of a glob and fields."""

WORDS: dict[str, Fields] = {
    "none": {},
    "recompute": {"recompute": True},
    "offload": {"offload": "host"},
    # transformers, accelerate, torchtune
    "gradient_checkpointing": {"recompute": True},
    "activation_checkpointing": {"recompute": True},
    "fsdp_activation_checkpointing": {"recompute": True},
    "fsdp_activation_checkpointing_offload": {"recompute": True, "offload": "host"},
    # TRL, axolotl, torchtune
    "activation_offloading": {"offload": "host"},
    "enable_activation_offloading": {"offload": "host"},
    "hidden_states": {"recompute": True, "offload": "host"},
    # DeepSpeed, Arctic, unsloth
    "cpu_checkpointing": {"recompute": True, "offload": "host"},
    "activation_checkpoint_cpu_offload": {"recompute": True, "offload": "host"},
    "unsloth": {"recompute": True, "offload": "host"},
    # tiling: ours, axolotl's, Arctic's, unsloth's
    "tile": {"tile": ("mlp", "loss")},
    "tiled_mlp": {"tile": ("mlp",)},
    "tiled_mlp_compute": {"tile": ("mlp",)},
    "unsloth_tiled_mlp": {"tile": ("mlp",)},
}

PARTS = ("mlp", "loss")
"""What can be tiled."""
PLACES = ("host", "disk")
"""Where to offload to."""


def meaning(word: str) -> Fields:
    """What a word says."""
    if word not in WORDS:
        raise InvalidValueError(unknown(word, WORDS, "word of a policy"))
    return dict(WORDS[word])


def united(fields: Fields, more: Fields) -> Fields:
    """What both say: parts to tile add up, and of everything else the later one counts."""
    parts = (*fields.get("tile", ()), *more.get("tile", ()))
    return {**fields, **more, **({"tile": parts} if parts else {})}
