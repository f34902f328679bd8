"""Finds the MLPs and mixtures of experts inside blocks, by their structure.

An MLP is a module with one or two linear layers that widen (`width -> inner`, or both fused into one), one that narrows
again (`inner -> width`), and nothing else that mixes features. Attention has a layer more, or other shapes, or takes
masks and positions. A mixture of experts is a module with a router and experts: a list of MLPs, or stacked weights of
three dimensions. An expert may be narrower inside than outside, as most are where there are many, and some may be no
more than an identity. What is found is only a candidate: whether it really works token by token is tried out when it
is first used.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lowtide.regions.blocks import Region


class _Linear(NamedTuple):
    inputs: int
    outputs: int


class _FeedForward(NamedTuple):
    width: int
    inner: int
    is_fused: bool
    """Whether one layer makes both the gate and what is gated."""


def find_mlps(regions: Sequence[Region]) -> list[tuple[Region, str, nn.Module]]:
    """The MLPs and mixtures of experts in some blocks, each with its block and its own name."""
    return [(region, name, module) for region in regions for name, module in _within(region.name, region.module)]


def listed_experts(module: nn.Module) -> list[nn.Module]:
    """The experts that a mixture calls one by one, each only if a token needs it."""
    lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
    return [expert for inner in lists if _count_experts(inner) for expert in inner]


def _within(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if _is_candidate(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _within(f"{name}.{child_name}", child)


def _is_candidate(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # never called itself: its parts are, one by one
        return False
    if any(_looks_at_other_tokens(inner) for inner in module.modules()):
        return False
    return _is_moe(module) or (_is_mlp(module) and not any(_is_mlp(child) for child in module.children()))


_OTHER_TOKENS = ("mask", "position", "past_", "cache", "attn", "attention")


def _looks_at_other_tokens(module: nn.Module) -> bool:
    """Whether the arguments of its forward speak of other tokens: masks, positions, caches."""
    forward = getattr(type(module), "forward", None)  # TorchScript's has none that can be read
    if forward is None or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    names = inspect.signature(forward).parameters
    return any(word in name for name in names for word in _OTHER_TOKENS)


def _is_moe(module: nn.Module) -> bool:
    for experts in module.children():
        count = _count_experts(experts)
        others = [child for child in module.children() if child is not experts]
        if count and any(_routes_to(count, other) for other in others):
            return True
    return False


def _count_experts(module: nn.Module) -> int:
    """How many experts a module holds; none if it is something else."""
    if isinstance(module, nn.ModuleList):
        working = [child for child in module if any(True for _ in child.parameters())]
        return len(module) if len(working) > 1 and all(map(_feed_forward, working)) else 0
    if any(True for _ in module.parameters(recurse=False)):
        return _count_stacked(module)
    counts = {_count_stacked(child) for child in module.children() if any(True for _ in child.parameters())}
    return counts.pop() if len(counts) == 1 else 0


def _count_stacked(module: nn.Module) -> int:
    """How many weights a module's own parameters hold, one upon the other."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0
    stacked = [w.shape[0] for w in module._parameters.values() if w is not None and w.dim() == 3]  # noqa: PLR2004
    return max(stacked, default=0) if max(stacked, default=0) > 1 else 0


def _routes_to(experts: int, module: nn.Module) -> bool:
    """Whether something in a module makes one number per expert."""
    for inner in module.modules():
        linear = _as_linear(inner)
        weights = [w for w in inner._parameters.values() if w is not None and w.dim() == 2]  # noqa: PLR2004
        if (linear is not None and linear.outputs == experts) or any(w.shape[0] == experts for w in weights):
            return True
    return False


def _is_mlp(module: nn.Module) -> bool:
    """Whether it is wider inside than outside: else a tile of it would save next to nothing."""
    found = _feed_forward(module)
    return found is not None and (found.inner > found.width or (found.is_fused and found.inner == found.width))


def _feed_forward(module: nn.Module) -> _FeedForward | None:
    """The widths of linear layers that go in and come back out, if that is all there is.

    The first goes in. A second one that does may be listed after the one that comes out: `w1`, `w2`, `w3`.
    """
    linears = _linears(module)
    if linears is None or len(linears) not in (2, 3):
        return None
    for position, out in enumerate(linears[1:], start=1):
        inner, width = out
        ins = linears[:position] + linears[position + 1 :]
        if all(layer == (width, inner) for layer in ins):
            return _FeedForward(width, inner, is_fused=False)
        if ins == [(width, 2 * inner)]:
            return _FeedForward(width, inner, is_fused=True)
    return None


def _linears(module: nn.Module) -> list[_Linear] | None:
    """The linear layers in a module, in order; None if something else in it mixes features, such as a convolution."""
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
