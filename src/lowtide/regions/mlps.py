"""Finds the MLPs and mixtures of experts inside blocks, by their structure.

An MLP is a module with one or two linear layers that widen (`width -> inner`, or both fused into one), one that narrows
again (`inner -> width`), and nothing else that mixes features. Attention has a layer more, or other shapes. A mixture
of experts is a module with experts for a child: a list of MLPs, or stacked weights of three dimensions. What is found
is only a candidate: whether it really works token by token is tried out when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lowtide.regions.blocks import Region


class _Linear(NamedTuple):
    inputs: int
    outputs: int


def find_mlps(regions: Sequence[Region]) -> list[tuple[Region, str, nn.Module]]:
    """The MLPs and mixtures of experts in some blocks, each with its block and its own name."""
    return [(region, name, module) for region in regions for name, module in _within(region.name, region.module)]


def _within(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if _is_moe(module) or (_is_mlp(module) and not any(_is_mlp(child) for child in module.children())):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _within(f"{name}.{child_name}", child)


def _is_moe(module: nn.Module) -> bool:
    children = list(module.children())
    has_router = any(not _are_experts(child) and any(True for _ in child.parameters()) for child in children)
    return has_router and any(_are_experts(child) for child in children)


def _are_experts(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 1 and all(_is_mlp(child) for child in module)
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    return any(w is not None and w.dim() == 3 and w.shape[0] > 1 for w in module._parameters.values())  # noqa: PLR2004


def _is_mlp(module: nn.Module) -> bool:
    linears = _linears(module)
    if linears is None or len(linears) not in (2, 3):
        return False
    return any(
        _widens_and_narrows([other for other in linears if other is not down], down)
        for down in linears
        if down.inputs >= down.outputs
    )


def _widens_and_narrows(ups: list[_Linear], down: _Linear) -> bool:
    if any(up.inputs != down.outputs for up in ups):
        return False
    fused = len(ups) == 1 and ups[0].outputs == 2 * down.inputs
    return fused or all(up.outputs == down.inputs for up in ups)


def _linears(module: nn.Module) -> list[_Linear] | None:
    """The linear layers in a module; None if something else in it mixes features, such as a convolution."""
    linear = _as_linear(module)
    if linear is not None:
        return [linear]
    if any(weight is not None and weight.dim() > 1 for weight in module._parameters.values()):
        return None
    found: list[_Linear] = []
    for child in module.children():
        inside = _linears(child)
        if inside is None:
            return None
        found += inside
    return found


def _as_linear(module: nn.Module) -> _Linear | None:
    """By their attributes: so quantized layers, adapters around layers, and GPT-2's `Conv1D` count as well."""
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        width, height = getattr(module, inputs, None), getattr(module, outputs, None)
        if isinstance(width, int) and isinstance(height, int):
            return _Linear(width, height)
    return None
