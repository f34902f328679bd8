"""Lists of numbers: mostly the sizes of the stages of a vision model, which halve its resolution one by one."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from lowtide.zoo.classes import configuration_class
from lowtide.zoo.fields import read
from lowtide.zoo.rules import Plan, bound_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def shrink_stages(config: Any, name: str, values: Sequence[int], plan: Plan) -> Sequence[int]:
    """A list of numbers for a small model, by its name."""
    if name in {"num_heads", "num_attention_heads"} and doubling_width(config) is not None:
        return [2**stage for stage in range(len(values))]
    shrink = next((shrink for pattern, shrink in _LISTS if re.fullmatch(pattern, name)), None)
    return values if shrink is None else shrink(name, values, plan)


def _each(name: str, values: Sequence[int], plan: Plan) -> list[int]:
    return [bound_of(name, value, plan) for value in values]


def _sides(name: str, values: Sequence[int], plan: Plan) -> Sequence[int]:
    """Height and width; where they differ, or there is one for each stage, they are left alone."""
    return _each(name, values, plan) if len(set(values)) == 1 else values


def _depths(name: str, values: Sequence[int], plan: Plan) -> list[int]:  # noqa: ARG001
    return [DEPTH] * len(values)


def _from_backbone(name: str, values: Sequence[int], plan: Plan) -> list[int]:  # noqa: ARG001
    return list(BACKBONE[-len(values) :])


def _all_widths(name: str, values: Sequence[int], plan: Plan) -> list[int]:  # noqa: ARG001
    return [plan.width] * len(values)


def _half_widths(name: str, values: Sequence[int], plan: Plan) -> list[int]:  # noqa: ARG001
    return [min(value, plan.width // 2) for value in values]


def _scaled_down(name: str, values: Sequence[int], plan: Plan) -> list[int]:  # noqa: ARG001
    """Divides all by the same number, so that what doubles from stage to stage still does."""
    least = plan.width // 4
    common = math.gcd(*values)
    divisors = (k for k in range(common, 0, -1) if common % k == 0)
    divisor = next((k for k in divisors if min(values) // k >= least and common // k % 8 == 0), 1)
    return [value // divisor for value in values]


_LISTS: tuple[tuple[str, Callable[[str, Sequence[int], Plan], Sequence[int]]], ...] = (
    ("image_size|input_size|img_size|crop_size|patch_size", _sides),
    (r"depths?|num_blocks|layers|num_hidden_layers|num_block_repeats|.*_depths", _depths),
    (".*intermediate.*", _each),
    ("encoder_in_channels", _from_backbone),
    ("decoder_in_channels", _all_widths),
    ("conv_dim|tdnn_dim", _half_widths),
    (r"(.*_)?(hidden_sizes|embed_dims?|dims|hidden_size|channels)", _scaled_down),
)
