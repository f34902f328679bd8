"""Decides how many layers a tiny model gets, and of which kinds; and how wide the stages of a vision model are.

A tiny model has two layers of every kind that the defaults have. Configurations describe kinds in three ways: a list
with one entry per layer, a list of the indices of special layers, or a number (the first n are dense, every nth has
full attention). In a tiny model, special and ordinary layers then alternate, or come two by two.

Vision models often have stages instead, each with half the resolution of the one before; their sizes are lists of
numbers.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from lowtide_zoo.classes import configuration_class, get_field
from lowtide_zoo.size_profile import SizeProfile, bound_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OF_ONE_KIND = 2
_OF_TWO_KINDS = 4

_LAYERS_PER_STAGE = 2

_BACKBONE_WIDTHS = (16, 32, 64, 128)

# Fields that count layers, and those that only look as if they did.
_COUNTS = re.compile(r"(.*_)?(layers|depth|n_layer|num_blocks|n_blocks|num_hidden_groups|num_encoder_blocks)")

_NOT_COUNTS = re.compile(
    r".*(window|shared|conv|mtp|nextn|logits|feat_extract|residual|lstm|every|first_|last_|timestamp|sparse).*"
    r"|max_depth|num_dense_layers|iou_head_depth|num_feature_.*|.*_to_.*|num_stages|.*postnet.*|.*prenet.*|.*predictor_layers"
)

# The fields that count the layers of the main stack, which the lists with one entry per layer describe.
_MAIN_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")

# Fields with the number of layers of the first kind, where the kind changes once.
_BOUNDARIES = {
    "first_k_dense_replace",
    "moe_layer_start_index",
    "num_dense_layers",
    "num_first_full_attention_layers",
    "num_kv_shared_layers",
    "num_sparse_decoder_layers",
    "num_sparse_encoder_layers",
}

# Fields with a period n: every nth layer is special.
_PERIODS = {
    "attn_layer_period",
    "cross_attention_frequency",
    "cross_layer_interval",
    "decoder_sparse_step",
    "encoder_sparse_step",
    "expert_layer_period",
    "full_attention_interval",
    "global_attn_every_n_layers",
    "interleave_moe_layer_step",
    "layer_group_size",
    "no_rope_layer_interval",
    "sliding_window_pattern",
}

# Fields with the index of the first special layer.
_OFFSETS = {"attn_layer_offset", "expert_layer_offset"}

# Fields with the indices of special layers.
_INDICES = re.compile(r".*(indexes|indices|indexs|_layers|layer_ids|layer_idx|_layer_index)")


def layer_fields(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that say how many layers there are, and of which kinds."""
    main = next((name for name in _MAIN_COUNTS if type(get_field(config, name)) is int and name in names), None)
    fields: dict[str, Any] = {}
    layers = _OF_ONE_KIND
    kinds = _kinds_per_layer(config, names, get_field(config, main) if main else 0)
    if kinds:
        layers = len(next(iter(kinds.values())))
        fields |= kinds
    mixed = _mixed_by_number(config, names)
    if main:
        mixed |= _special_indices(config, names, get_field(config, main))
    if mixed:
        layers = max(layers, _OF_TWO_KINDS)
        fields |= mixed
    fields |= _counts(config, names, layers)
    if kinds and main:
        fields[main] = layers
    return fields | _backbone_outputs(config, names, fields.get(main, layers) if main else 0)


def _counts(config: Any, names: Sequence[str], layers: int) -> dict[str, int]:
    found = {}
    if isinstance(get_field(config, "depths"), list | tuple):
        return {}
    for name in names:
        value = get_field(config, name)
        if type(value) is int and value > 0 and _COUNTS.fullmatch(name) and not _NOT_COUNTS.fullmatch(name):
            # A single layer becomes two in the main stack; elsewhere it stays single.
            found[name] = layers if name in _MAIN_COUNTS else min(value, layers)
    return found


def _kinds_per_layer(config: Any, names: Sequence[str], layers: int) -> dict[str, list[Any]]:
    """Cut the lists with one entry per layer to two of every kind."""
    if layers < _OF_ONE_KIND:
        return {}
    lists = {name: get_field(config, name) for name in names}
    lists = {
        n: v for n, v in lists.items() if isinstance(v, list | tuple) and len(v) == layers and _are_kinds(config, n, v)
    }
    indices = {n: v for n, v in lists.items() if list(v) == list(range(layers))}
    lists = {n: v for n, v in lists.items() if n not in indices}
    if not lists:
        return {}
    chosen = _covering_layers([tuple(entries) for entries in zip(*lists.values(), strict=True)])
    columns = zip(*(chosen * 2), strict=True)
    kinds = {name: list(column) for name, column in zip(lists, columns, strict=True)}
    # A list that holds every layer's own index still does.
    return kinds | {name: list(range(2 * len(chosen))) for name in indices}


def _are_kinds(config: Any, name: str, entries: Sequence[Any]) -> bool:
    """Tell whether a list describes layers; a list of numbers may describe stages instead."""
    if all(isinstance(entry, str | bool) for entry in entries):
        return True
    is_about_layers = "layer" in name or not isinstance(get_field(config, "depths"), list | tuple)
    return is_about_layers and all(isinstance(entry, str | int | float) for entry in entries)


def _covering_layers(layers: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Choose the first layers that together show every value of every list."""
    seen: set[tuple[int, Any]] = set()
    chosen = []
    for layer in dict.fromkeys(layers):
        new = set(enumerate(layer)) - seen
        if new:
            chosen.append(layer)
            seen |= new
    return chosen


def _mixed_by_number(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the numbers that mix kinds of layers, set so that two of each kind fit into four layers."""
    found: dict[str, Any] = {}
    for name in names:
        value = get_field(config, name)
        if type(value) is not int or value < 1:
            continue
        if name in _BOUNDARIES or (name in _PERIODS and value > 1):
            found[name] = 2
        elif name in _OFFSETS:
            found[name] = 1
    return found


def _special_indices(config: Any, names: Sequence[str], layers: int) -> dict[str, Any]:
    listed = (name for name in names if _INDICES.fullmatch(name))
    return {name: [1, 3] for name in listed if _are_some_layers(get_field(config, name), layers)}


def _are_some_layers(indices: Any, layers: int) -> bool:
    """Tell whether these are the indices of some layers, but not of all."""
    if not isinstance(indices, list | tuple) or not all(type(index) is int for index in indices):
        return False
    different = set(indices)
    return 0 < len(different) == len(indices) < layers and different <= set(range(layers))


def _backbone_outputs(config: Any, names: Sequence[str], layers: int) -> dict[str, Any]:
    """Keep as many outputs of a backbone as the defaults have: those of the last layers."""
    outputs = vars(config).get("_out_indices")
    if not outputs:
        return {}
    stages = vars(config).get("stage_names") or []
    if isinstance(get_field(config, "depths"), list | tuple) or layers == 0:
        return {"out_indices": list(outputs)} if list(outputs) != [len(stages) - 1] else {}
    count = len(outputs)
    if count == 1:
        return {}
    layers = max(layers, count)
    main = next(name for name in _MAIN_COUNTS if name in names)
    return {main: layers, "out_indices": list(range(layers - count + 1, layers + 1))}


def small_backbone() -> Any:
    """Return a small ResNet's configuration, to replace timm's backbones: those need timm, often pretrained weights."""
    return configuration_class("resnet")(
        embedding_size=_BACKBONE_WIDTHS[0],
        hidden_sizes=list(_BACKBONE_WIDTHS),
        depths=[_LAYERS_PER_STAGE] * len(_BACKBONE_WIDTHS),
        layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def is_staged(config: Any) -> bool:
    """Tell whether a vision model has stages, and so needs larger images."""
    return any(
        isinstance(get_field(config, name), list | tuple) for name in ("depths", "hidden_sizes", "num_block_repeats")
    )


def doubling_width(config: Any) -> str | None:
    """Return the name of the field with the first stage's width, if widths double from stage to stage."""
    if not isinstance(get_field(config, "depths"), list | tuple):
        return None
    return next((n for n in ("embed_dim", "patch_embeds_hidden_size") if type(get_field(config, n)) is int), None)


def shrink_stages(config: Any, name: str, values: Sequence[int], profile: SizeProfile) -> Sequence[int]:
    """Shrink a list of numbers, as its name demands."""
    if name in {"num_heads", "num_attention_heads"} and doubling_width(config) is not None:
        return [2**stage for stage in range(len(values))]
    shrink = next((shrink for pattern, shrink in _LISTS if re.fullmatch(pattern, name)), None)
    return values if shrink is None else shrink(name, values, profile)


def _each(name: str, values: Sequence[int], profile: SizeProfile) -> list[int]:
    return [bound_of(name, value, profile) for value in values]


def _sides(name: str, values: Sequence[int], profile: SizeProfile) -> Sequence[int]:
    """Shrink height and width; where they differ, or there is one number per stage, leave them alone."""
    return _each(name, values, profile) if len(set(values)) == 1 else values


def _depths(name: str, values: Sequence[int], profile: SizeProfile) -> list[int]:  # noqa: ARG001
    return [_LAYERS_PER_STAGE] * len(values)


def _from_backbone(name: str, values: Sequence[int], profile: SizeProfile) -> list[int]:  # noqa: ARG001
    return list(_BACKBONE_WIDTHS[-len(values) :])


def _all_widths(name: str, values: Sequence[int], profile: SizeProfile) -> list[int]:  # noqa: ARG001
    return [profile.width] * len(values)


def _half_widths(name: str, values: Sequence[int], profile: SizeProfile) -> list[int]:  # noqa: ARG001
    return [min(value, profile.width // 2) for value in values]


def _scaled_down(name: str, values: Sequence[int], profile: SizeProfile) -> list[int]:  # noqa: ARG001
    """Divide all by the same number, so that what doubles from stage to stage still does."""
    least = profile.width // 4
    common = math.gcd(*values)
    divisors = (k for k in range(common, 0, -1) if common % k == 0)
    divisor = next((k for k in divisors if min(values) // k >= least and common // k % 8 == 0), 1)
    return [value // divisor for value in values]


_LISTS: tuple[tuple[str, Callable[[str, Sequence[int], SizeProfile], Sequence[int]]], ...] = (
    ("image_size|input_size|img_size|crop_size|patch_size", _sides),
    (r"depths?|num_blocks|layers|num_hidden_layers|num_block_repeats|.*_depths", _depths),
    (".*intermediate.*", _each),
    ("encoder_in_channels", _from_backbone),
    ("decoder_in_channels", _all_widths),
    ("conv_dim|tdnn_dim", _half_widths),
    (r"(.*_)?(hidden_sizes|embed_dims?|dims|hidden_size|channels)", _scaled_down),
)
