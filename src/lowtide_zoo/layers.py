"""How many layers a tiny model gets, and of which kind: two of every kind that the defaults have.

Kinds are said in three ways: a list with one entry for each layer, a list of the indices of special layers, or a number
(the first so many are dense, every so many has full attention). In all of them, special and ordinary layers then
alternate, or come two by two.

Lists of numbers: mostly the sizes of the stages of a vision model, which halve its resolution one by one.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from lowtide_zoo.classes import configuration_class, read
from lowtide_zoo.size_profile import SizeProfile, bound_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OF_ONE_KIND = 2

OF_TWO_KINDS = 4

_COUNTS = re.compile(r"(.*_)?(layers|depth|n_layer|num_blocks|n_blocks|num_hidden_groups|num_encoder_blocks)")

_NOT_COUNTS = re.compile(
    r".*(window|shared|conv|mtp|nextn|logits|feat_extract|residual|lstm|every|first_|last_|timestamp|sparse).*"
    r"|max_depth|num_dense_layers|iou_head_depth|num_feature_.*|.*_to_.*|num_stages|.*postnet.*|.*prenet.*|.*predictor_layers"
)

# Which of them the lists with one entry for each layer belong to.
_MAIN_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")

# Where the kind changes once: that many layers of the first kind.
_BOUNDARIES = {
    "first_k_dense_replace",
    "moe_layer_start_index",
    "num_dense_layers",
    "num_first_full_attention_layers",
    "num_kv_shared_layers",
    "num_sparse_decoder_layers",
    "num_sparse_encoder_layers",
}

# Where every so many layers one is special.
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

_OFFSETS = {"attn_layer_offset", "expert_layer_offset"}

_INDICES = re.compile(r".*(indexes|indices|indexs|_layers|layer_ids|layer_idx|_layer_index)")


def layer_fields(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """The fields that say how many layers there are, and of which kind."""
    main = next((name for name in _MAIN_COUNTS if type(read(config, name)) is int and name in names), None)
    fields: dict[str, Any] = {}
    layers = OF_ONE_KIND
    kinds = _alternating_kinds(config, names, read(config, main) if main else 0)
    if kinds:
        layers = len(next(iter(kinds.values())))
        fields |= kinds
    mixed = _mixing_numbers(config, names)
    if main:
        mixed |= _special_indices(config, names, read(config, main))
    if mixed:
        layers = max(layers, OF_TWO_KINDS)
        fields |= mixed
    fields |= _counts(config, names, layers)
    if kinds and main:
        fields[main] = layers
    return fields | _outputs(config, names, fields.get(main, layers) if main else 0)


def _counts(config: Any, names: Sequence[str], layers: int) -> dict[str, int]:
    found = {}
    if isinstance(read(config, "depths"), list | tuple):
        return {}
    for name in names:
        value = read(config, name)
        if type(value) is int and value > 0 and _COUNTS.fullmatch(name) and not _NOT_COUNTS.fullmatch(name):
            # A single layer becomes two, unless it is a part on the side.
            found[name] = layers if name in _MAIN_COUNTS else min(value, layers)
    return found


def _alternating_kinds(config: Any, names: Sequence[str], layers: int) -> dict[str, list[Any]]:
    """The lists with one entry for each layer, cut to two of every kind."""
    if layers < OF_ONE_KIND:
        return {}
    lists = {name: read(config, name) for name in names}
    lists = {
        n: v for n, v in lists.items() if isinstance(v, list | tuple) and len(v) == layers and _are_kinds(config, n, v)
    }
    itself = {n: v for n, v in lists.items() if list(v) == list(range(layers))}
    lists = {n: v for n, v in lists.items() if n not in itself}
    if not lists:
        return {}
    chosen = _cover([tuple(entries) for entries in zip(*lists.values(), strict=True)])
    columns = zip(*(chosen * 2), strict=True)
    kinds = {name: list(column) for name, column in zip(lists, columns, strict=True)}
    # A list in which every layer names itself still does.
    return kinds | {name: list(range(2 * len(chosen))) for name in itself}


def _are_kinds(config: Any, name: str, entries: Sequence[Any]) -> bool:
    """Whether a list is about layers. One of numbers may be about stages as well."""
    if all(isinstance(entry, str | bool) for entry in entries):
        return True
    is_about_layers = "layer" in name or not isinstance(read(config, "depths"), list | tuple)
    return is_about_layers and all(isinstance(entry, str | int | float) for entry in entries)


def _cover(layers: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The first layers that show every value of every list."""
    seen: set[tuple[int, Any]] = set()
    chosen = []
    for layer in dict.fromkeys(layers):
        new = set(enumerate(layer)) - seen
        if new:
            chosen.append(layer)
            seen |= new
    return chosen


def _mixing_numbers(config: Any, names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        value = read(config, name)
        if type(value) is not int or value < 1:
            continue
        if name in _BOUNDARIES or (name in _PERIODS and value > 1):
            found[name] = 2
        elif name in _OFFSETS:
            found[name] = 1
    return found


def _special_indices(config: Any, names: Sequence[str], layers: int) -> dict[str, Any]:
    listed = (name for name in names if _INDICES.fullmatch(name))
    return {name: [1, 3] for name in listed if _are_some_of(read(config, name), layers)}


def _are_some_of(indices: Any, layers: int) -> bool:
    """Whether these are the indices of some layers, but not of all."""
    if not isinstance(indices, list | tuple) or not all(type(index) is int for index in indices):
        return False
    different = set(indices)
    return 0 < len(different) == len(indices) < layers and different <= set(range(layers))


def _outputs(config: Any, names: Sequence[str], layers: int) -> dict[str, Any]:
    """As many outputs of a backbone as before: the last ones."""
    outputs = vars(config).get("_out_indices")
    if not outputs:
        return {}
    stages = vars(config).get("stage_names") or []
    if isinstance(read(config, "depths"), list | tuple) or layers == 0:
        return {"out_indices": list(outputs)} if list(outputs) != [len(stages) - 1] else {}
    count = len(outputs)
    if count == 1:
        return {}
    layers = max(layers, count)
    main = next(name for name in _MAIN_COUNTS if name in names)
    return {main: layers, "out_indices": list(range(layers - count + 1, layers + 1))}


# Layers in each stage.
DEPTH = 2

BACKBONE = (16, 32, 64, 128)


def small_backbone() -> Any:
    """Stands in for the backbones of timm, which are another package's models and often pretrained."""
    return configuration_class("resnet")(
        embedding_size=BACKBONE[0],
        hidden_sizes=list(BACKBONE),
        depths=[DEPTH] * len(BACKBONE),
        layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def is_staged(config: Any) -> bool:
    """Whether a vision model has stages, and so needs larger images."""
    return any(isinstance(read(config, name), list | tuple) for name in ("depths", "hidden_sizes", "num_block_repeats"))


def doubling_width(config: Any) -> str | None:
    """The field with the width of the first stage, where it doubles from stage to stage."""
    if not isinstance(read(config, "depths"), list | tuple):
        return None
    return next((n for n in ("embed_dim", "patch_embeds_hidden_size") if type(read(config, n)) is int), None)


def shrink_stages(config: Any, name: str, values: Sequence[int], plan: SizeProfile) -> Sequence[int]:
    """A list of numbers for a small model, by its name."""
    if name in {"num_heads", "num_attention_heads"} and doubling_width(config) is not None:
        return [2**stage for stage in range(len(values))]
    shrink = next((shrink for pattern, shrink in _LISTS if re.fullmatch(pattern, name)), None)
    return values if shrink is None else shrink(name, values, plan)


def _each(name: str, values: Sequence[int], plan: SizeProfile) -> list[int]:
    return [bound_of(name, value, plan) for value in values]


def _sides(name: str, values: Sequence[int], plan: SizeProfile) -> Sequence[int]:
    """Height and width; where they differ, or there is one for each stage, they are left alone."""
    return _each(name, values, plan) if len(set(values)) == 1 else values


def _depths(name: str, values: Sequence[int], plan: SizeProfile) -> list[int]:  # noqa: ARG001
    return [DEPTH] * len(values)


def _from_backbone(name: str, values: Sequence[int], plan: SizeProfile) -> list[int]:  # noqa: ARG001
    return list(BACKBONE[-len(values) :])


def _all_widths(name: str, values: Sequence[int], plan: SizeProfile) -> list[int]:  # noqa: ARG001
    return [plan.width] * len(values)


def _half_widths(name: str, values: Sequence[int], plan: SizeProfile) -> list[int]:  # noqa: ARG001
    return [min(value, plan.width // 2) for value in values]


def _scaled_down(name: str, values: Sequence[int], plan: SizeProfile) -> list[int]:  # noqa: ARG001
    """Divides all by the same number, so that what doubles from stage to stage still does."""
    least = plan.width // 4
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
