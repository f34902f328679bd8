"""Turns on features that share or skip state, which an architecture has and its default configuration leaves off.

A variant changes fields of a shrunken configuration, wherever they occur in it, or the batch. An architecture whose
configuration has nothing to change, because it lacks the feature or has it on, does not have the variant.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from lowtide_zoo.classes import configurations_in, get_field

if TYPE_CHECKING:
    from collections.abc import Callable

SEVERAL_IMAGES = "several-images"
"""Two images in every row. It changes the batch, not the configuration."""

_WINDOW = 8
"""Shorter than a row of text."""


_FEWEST_LAYERS = 2
_FULL = "full_attention"


def _kv_sharing(config: Any) -> dict[str, Any]:
    """Let the second half of the layers use the keys and values of the first."""
    layers, kinds = get_field(config, "num_hidden_layers"), get_field(config, "layer_types")
    if get_field(config, "num_kv_shared_layers") != 0 or not isinstance(layers, int) or layers < _FEWEST_LAYERS:
        return {}
    if isinstance(kinds, list) and set(kinds[: layers - layers // 2]) != set(kinds):
        return {}
    return {"num_kv_shared_layers": layers // 2}


def _moe(config: Any) -> dict[str, Any]:
    """Put experts into the layers, or several where there is one."""
    if get_field(config, "enable_moe_block") is False:
        return {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    if get_field(config, "is_moe") is False:
        return {"is_moe": True}
    chosen = [name for name in ("moe_topk", "num_experts_per_tok") if name in vars(config)]
    return {"num_experts": 4, **dict.fromkeys(chosen, 2)} if chosen and get_field(config, "num_experts") == 1 else {}


def _sliding_window(config: Any) -> dict[str, Any]:
    """Let every second layer attend to a window that is shorter than the text; all, where layers are not told apart."""
    layers, kinds = get_field(config, "num_hidden_layers"), get_field(config, "layer_types")
    if "sliding_window" not in vars(config) or not isinstance(layers, int):
        return {}
    are_full = isinstance(kinds, list) and set(kinds) == {_FULL}
    if not are_full and (kinds or get_field(config, "sliding_window")):
        return {}
    fields: dict[str, Any] = {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 0}
    if are_full:
        fields["layer_types"] = ["sliding_attention" if number % 2 else _FULL for number in range(layers)]
        rope = get_field(config, "rope_parameters")
        if isinstance(rope, dict) and _FULL in rope:  # each kind of layer has its own
            fields["rope_parameters"] = {"sliding_attention": copy.deepcopy(rope[_FULL]), **rope}
    return {name: value for name, value in fields.items() if name in vars(config)}


def _deepstack(config: Any) -> dict[str, Any]:
    """Hand features of early vision layers to early text layers."""
    depth = get_field(config, "depth")
    is_off = "deepstack_visual_indexes" in vars(config) and not get_field(config, "deepstack_visual_indexes")
    return {"deepstack_visual_indexes": list(range(min(2, depth)))} if is_off and isinstance(depth, int) else {}


_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "kv-sharing": _kv_sharing,
    "moe": _moe,
    "sliding-window": _sliding_window,
    "deepstack": _deepstack,
}

VARIANTS = (*_FIELDS, SEVERAL_IMAGES)
"""The names of all variants."""

_PICTURES = ("image_token_id", "image_token_index")


def variants_of(config: Any) -> list[str]:
    """Return the variants that a shrunken configuration has."""
    found = [name for name in _FIELDS if with_variant(config, name) is not None]
    takes_images = any(
        isinstance(get_field(part, name), int) for part in configurations_in(config) for name in _PICTURES
    )
    return [*found, SEVERAL_IMAGES] if takes_images else found


def with_variant(config: Any, variant: str) -> Any | None:
    """Return a copy of a shrunken configuration with a feature turned on; None if there is nothing to turn on."""
    if variant == SEVERAL_IMAGES:
        return config
    changed, twin = False, copy.deepcopy(config)
    for part in configurations_in(twin):
        for name, value in _FIELDS[variant](part).items():
            setattr(part, name, value)
            changed = True
    return twin if changed else None
