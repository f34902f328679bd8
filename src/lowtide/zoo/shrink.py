"""Shrinks the defaults of a configuration class to those of a tiny model of the same architecture.

Integers shrink by the rules for their names, lists by what they describe: the kinds of layers, the sizes of stages.
Every kind of layer stays, and occurs twice. The small values go through the configuration's own constructor, which
derives and validates the rest.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from lowtide.zoo.classes import configuration_class
from lowtide.zoo.fields import field_names, is_configuration, read
from lowtide.zoo.layers import layer_fields
from lowtide.zoo.overrides import override_for
from lowtide.zoo.rotary import shrink_rotary
from lowtide.zoo.rules import Plan, bound_of
from lowtide.zoo.token_ids import TokenIds, is_token_id

if TYPE_CHECKING:
    from collections.abc import Sequence

# Randomness that does not come from torch, or that leaves out whole layers, is off; and the last layer of a tower is
# read, not the one before it, so that all layers have gradients.
_SETTINGS: dict[str, Any] = {
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "speech_encoder_layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "vision_feature_layer": -1,
}


def shrink(config: Any, plan: Plan, tokens: TokenIds | None = None) -> Any:
    """A tiny configuration of the same class as this default one."""
    tokens = tokens or TokenIds(plan.vocabulary)
    names = field_names(config)
    changed: dict[str, Any] = {}
    for name in names:
        value = read(config, name)
        small = _shrink_field(config, name, value, plan, tokens)
        if small is not value:
            changed[name] = small
    changed |= layer_fields(config, names)
    changed |= shrink_rotary(config, plan.head_dim)
    changed |= _heads_of_state_spaces(config, names, changed.get("hidden_size", read(config, "hidden_size")), plan)
    changed |= {name: value for name, value in _SETTINGS.items() if isinstance(read(config, name), int | float)}
    changed |= override_for(config, plan)
    return type(config)(**changed)


def _shrink_field(config: Any, name: str, value: Any, plan: Plan, tokens: TokenIds) -> Any:
    if is_configuration(value):
        return small_backbone() if value.model_type == "timm_backbone" else shrink(value, plan, tokens)
    if type(value) is int:
        return tokens.move(name, value) if is_token_id(name) else _shrink_integer(config, name, value, plan)
    if isinstance(value, list | tuple) and value and all(type(entry) is int for entry in value):
        if is_token_id(name):
            return type(value)(tokens.move(name, entry) for entry in value)
        return type(value)(_shrink_integers(name, value, plan))
    return value


def small_backbone() -> Any:
    """Stands in for the backbones of timm, which are another package's models and often pretrained."""
    return configuration_class("resnet")(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 128],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def _shrink_integer(config: Any, name: str, value: int, plan: Plan) -> int:
    if name in {"image_size", "pretrain_image_size", "spec_size"} and is_staged(config):
        return min(value, plan.staged_image)
    if "heads" in name and re.search(r"key_value|kv", name) and value > 1:
        return min(value, plan.heads if value == _query_heads(config) else plan.heads // 2)
    return bound_of(name, value, plan)


def _query_heads(config: Any) -> int | None:
    names = ("num_attention_heads", "num_heads", "n_head", "encoder_num_attention_heads")
    return next((read(config, name) for name in names if type(read(config, name)) is int), None)


def is_staged(config: Any) -> bool:
    """Whether a vision model halves its resolution from stage to stage, and so needs larger images."""
    return any(isinstance(read(config, name), list | tuple) for name in ("depths", "hidden_sizes", "num_block_repeats"))


def _shrink_integers(name: str, value: Sequence[int], plan: Plan) -> Sequence[int]:
    if re.fullmatch(r"image_size|input_size|img_size|crop_size|patch_size", name) and len(set(value)) == 1:
        return [bound_of(name, entry, plan) for entry in value]
    if re.fullmatch(r"depths?|num_blocks|layers|num_hidden_layers|num_block_repeats|.*_depths", name):
        return [min(entry, 2) for entry in value]
    if name in {"conv_dim", "tdnn_dim"}:
        return [min(entry, plan.width // 2) for entry in value]
    if re.fullmatch(r"(.*_)?(hidden_sizes|embed_dims?|dims|hidden_size|channels)", name):
        return _scale_down(value)
    return value


def _scale_down(values: Sequence[int], least: int = 16) -> list[int]:
    """Divides all by the same number, so that what doubles from stage to stage still does."""
    common = math.gcd(*values)
    divisors = (k for k in range(common, 0, -1) if common % k == 0)
    divisor = next((k for k in divisors if min(values) // k >= least and common // k % 8 == 0), 1)
    return [value // divisor for value in values]


_STATE_SPACE_HEADS = (
    ("num_heads", "head_dim"),
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
    ("mamba_num_heads", "mamba_head_dim"),
)


def _heads_of_state_spaces(config: Any, names: Sequence[str], width: Any, plan: Plan) -> dict[str, int]:
    """Their heads must cover the expanded width."""
    expand = next(
        (read(config, n) for n in ("expand", "mamba_expand") if isinstance(read(config, n), int | float)), None
    )
    if expand is None or not isinstance(width, int):
        return {}
    found = {}
    for heads, head_dim in _STATE_SPACE_HEADS:
        if heads in names and head_dim in names and read(config, head_dim) is not None:
            found |= {head_dim: plan.head_dim, heads: int(expand * width) // plan.head_dim}
    return found
