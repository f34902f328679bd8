"""Finds the parts of a model that a policy acts on, by structure: its regions, the MLPs in them, and its head.

A region is recomputed or offloaded as a whole. It is, in this order: what the user names; a layer that transformers
marks as one (`GradientCheckpointingLayer`); a block of a stack, that is, of a container with two or more blocks of the
same class, or of a module with numbered attributes in place of a container (a RegNet's stages and their blocks). Where
the blocks of a stack differ in shape (the stages of a Swin), the stacks inside them are the better regions; a block
beside them that holds no stack (a codec's convolution between residual units) is a region itself.

An MLP is a module with one or two linear layers that widen (`width -> inner`, or both fused into one), one that narrows
again (`inner -> width`), and nothing else that mixes features. Attention has one layer more, or different shapes, or
takes masks and positions. A mixture of experts is a module with a router and experts: a list of MLPs, or stacked
weights of three dimensions. An expert may be narrower inside than outside, as most are where there are many, and some
may be no more than an identity. What is found is only a candidate: whether it really works token by token is tried out
when it is first used.

The head is the last linear layer of a language model, inside the model whose `forward` takes labels.

Nothing is asked of the model: no flag, no base class, no list of names.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import inspect
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from lowtide._torch import ConvNd, parameters_of
from lowtide.errors import InvalidValueError, NoRegionError
from lowtide.tiling.attention_call import asks_for_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


Selector = type[nn.Module] | str
"""What the user names a region by: a class, a class name, or a glob on module names."""


# --- Regions --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Region:
    """A module whose activations are handled as a whole."""

    name: str
    module: nn.Module
    index: int
    """Its place in its stack."""


def find_regions(model: nn.Module, select: Sequence[Selector] | None = None) -> list[Region]:
    """Return the regions of a model in the order of its modules. Raises `NoRegionError` if there is none."""
    found = _selected(model, select) if select is not None else [*_marked(model), *_stacked(model)]
    if not found:
        raise NoRegionError(
            f"{type(model).__name__} has no stack of repeated blocks to recompute or offload: name its regions with "
            'regions=["encoder.layer.*"] (globs on module names, class names or classes)'
        )
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    return _numbered(sorted(found, key=lambda pair: order[pair[0]]))


def _numbered(found: list[tuple[str, nn.Module]]) -> list[Region]:
    counts: collections.Counter[str] = collections.Counter()
    regions = []
    for name, module in found:
        stack = name.rpartition(".")[0]
        regions.append(Region(name, module, counts[stack]))
        counts[stack] += 1
    return regions


def _selected(model: nn.Module, select: Sequence[Selector]) -> list[tuple[str, nn.Module]]:
    """Return what the user names, outermost first. A selector that matches nothing would silently do nothing."""
    if isinstance(select, str | type):
        raise InvalidValueError(f"regions must be a list, like regions=[{_as_code(select)}]")
    found: list[tuple[str, nn.Module]] = []
    used: set[Selector] = set()
    for name, module in model.named_modules():
        matching = [selector for selector in select if _matches(name, module, selector)]
        if name and matching and _is_called(module):
            used.update(matching)
            if not _is_within(name, [taken for taken, _ in found]):
                found.append((name, module))
    if unused := [selector for selector in select if selector not in used]:
        raise NoRegionError(
            f"no module of {type(model).__name__} that is called matches {', '.join(map(_as_code, unused))}: give "
            "class names, classes or globs on module names. Containers (ModuleList) are not called: name what is in "
            "them, like 'layers.*'"
        )
    return found


def _as_code(selector: Selector) -> str:
    return repr(selector) if isinstance(selector, str) else selector.__name__


def _matches(name: str, module: nn.Module, selector: Selector) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector) or type(module).__name__ == selector
    return isinstance(module, selector)


def _marked(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    taken: list[str] = []
    for name, module in model.named_modules():
        if name and _is_marked(module) and not _is_within(name, taken):
            taken.append(name)
            yield name, module


def _is_marked(module: nn.Module) -> bool:
    """Return whether transformers marks a module; looked up by name, so that transformers need not be imported."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def _is_within(name: str, parents: list[str]) -> bool:
    return any(name.startswith(f"{parent}.") for parent in parents)


def _stacked(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of stacks in those parts of the model that have no marked layer."""
    blocks = _blocks_of_stack(model)
    if blocks and _are_alike(blocks):
        yield from ((f"{prefix}{name}", block) for name, block in blocks)
        return
    names = {name for name, _ in blocks}
    for name, child in model.named_children():
        if _is_marked(child):
            continue
        inside = list(_stacked(child, f"{prefix}{name}."))
        yield from inside or ([(f"{prefix}{name}", child)] if name in names else [])


def _blocks_of_stack(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks if `container` is a stack: children with parts and parameters, two of them of one class."""
    if not isinstance(container, nn.ModuleList | nn.Sequential) and not _is_numbered(container):
        return _numbered_attributes(container) or _stages(container)
    blocks = [(name, child) for name, child in container.named_children() if _is_block(child)]
    classes = collections.Counter(type(block) for _, block in blocks)
    return blocks if classes and max(classes.values()) > 1 else []


def _numbered_attributes(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a module that is nothing but a stack, held as attributes: `b1`, `b2`, `b3` (timm's RegNet).

    Two such attributes are more often the two halves of one block.
    """
    children = list(module.named_children())
    is_stack = len(children) >= _STACK_OF_ATTRIBUTES and len({_without_number(name) for name, _ in children}) == 1
    return children if is_stack and _are_blocks_of_one_class(children) else []


_STACK_OF_ATTRIBUTES = 3


def _stages(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the stages that a module holds as attributes: `s1`, `s2`, ..., of one class, of which one is a stack."""
    holding = {_without_number(name) for name, child in module.named_children() if _numbered_attributes(child)}
    stages = [(name, child) for name, child in module.named_children() if _without_number(name) in holding]
    return stages if len(stages) > 1 and _are_blocks_of_one_class(stages) else []


def _without_number(name: str) -> str:
    """Return an attribute's name without the number at its end; the whole name followed by a blank if it has none."""
    return name.rstrip("0123456789") if name[-1].isdecimal() else f"{name} "


def _are_blocks_of_one_class(children: list[tuple[str, nn.Module]]) -> bool:
    one_class = len({type(child) for _, child in children}) == 1
    return one_class and all(_is_block(child) and _as_linear(child) is None for _, child in children)


def _is_numbered(container: nn.Module) -> bool:
    """Return whether a dictionary has numbers for keys (torchtitan's layers). Names might be those of towers."""
    return isinstance(container, nn.ModuleDict) and all(name.isdecimal() for name in container)


def _is_block(module: nn.Module) -> bool:
    if not _is_called(module):
        return False
    has_parts = any(True for _ in module.children())
    has_marked = any(_is_marked(inner) for inner in module.modules())
    return has_parts and not has_marked and any(True for _ in module.parameters())


def _is_called(module: nn.Module) -> bool:
    """Return False for a ModuleList, and for a bare Module that only names its parts (a VQGAN's levels)."""
    own = getattr(type(module), "forward", None)  # TorchScript's cannot be read
    return own is not nn.Module.forward or "forward" in vars(module)


def _are_alike(blocks: list[tuple[str, nn.Module]]) -> bool:
    """Return whether most blocks have a twin: the same class and the same shapes of parameters."""
    forms = collections.Counter(
        (type(block), tuple(tuple(parameter.shape) for parameter in block.parameters())) for _, block in blocks
    )
    with_twin = sum(count for count in forms.values() if count > 1)
    return 2 * with_twin > len(blocks)


# --- MLPs and mixtures of experts -----------------------------------------------------------------------------------


class MLP(NamedTuple):
    """An MLP or a mixture of experts, and the region that it is in."""

    region: Region
    name: str
    module: nn.Module


def find_mlps(regions: Sequence[Region]) -> list[MLP]:
    """Return the MLPs and mixtures of experts in some regions."""
    return [MLP(region, name, module) for region in regions for name, module in _mlps_in(region.name, region.module)]


def listed_experts(module: nn.Module) -> list[nn.Module]:
    """Return the experts that a mixture calls one by one, each only if a token needs it."""
    lists = (inner for inner in module.modules() if isinstance(inner, nn.ModuleList))
    return [expert for inner in lists if _count_experts(inner) for expert in inner]


def _mlps_in(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if _is_candidate(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _mlps_in(f"{name}.{child_name}", child)


def _is_candidate(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # never called itself: its parts are, one by one
        return False
    if any(_looks_at_other_tokens(inner) for inner in module.modules()):
        return False
    called = [child for child in module.children() if _is_called(child)]  # a list of layers is not (diffusers' MLPs)
    return _is_moe(module) or (_is_mlp(module) and not any(map(_is_mlp, called)))


_OTHER_TOKENS = ("mask", "position", "past_", "cache", "attn", "attention")


def _looks_at_other_tokens(module: nn.Module) -> bool:
    """Return whether the arguments of a module's forward tell of other tokens: masks, positions, caches."""
    forward = getattr(type(module), "forward", None)  # TorchScript's cannot be read
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
    """Count the experts that a module holds; 0 if it is something else."""
    if isinstance(module, nn.ModuleList):
        working = [child for child in module if any(True for _ in child.parameters())]
        return len(module) if len(working) > 1 and all(map(_feed_forward, working)) else 0
    if any(True for _ in module.parameters(recurse=False)):
        return _count_stacked(module)
    counts = {_count_stacked(child) for child in module.children() if any(True for _ in child.parameters())}
    return counts.pop() if len(counts) == 1 else 0


def _count_stacked(module: nn.Module) -> int:
    """Count the weights that are stacked in a module's own parameters of three dimensions."""
    if isinstance(module, ConvNd):
        return 0
    stacked = [w.shape[0] for w in parameters_of(module).values() if w is not None and w.dim() == 3]  # noqa: PLR2004
    return max(stacked, default=0) if max(stacked, default=0) > 1 else 0


def _routes_to(experts: int, module: nn.Module) -> bool:
    """Return whether something in a module makes one number per expert."""
    for inner in module.modules():
        linear = _as_linear(inner)
        weights = [w for w in parameters_of(inner).values() if w is not None and w.dim() == 2]  # noqa: PLR2004
        if (linear is not None and linear.outputs == experts) or any(w.shape[0] == experts for w in weights):
            return True
    return False


def _is_mlp(module: nn.Module) -> bool:
    """Return whether a module is an MLP that is wider inside than outside: else a tile would save next to nothing."""
    found = _feed_forward(module)
    return found is not None and (found.inner > found.width or (found.is_fused and found.inner == found.width))


class _Linear(NamedTuple):
    inputs: int
    outputs: int


class _FeedForward(NamedTuple):
    width: int
    inner: int
    is_fused: bool
    """Whether one layer makes both the gate and what is gated."""


def _feed_forward(module: nn.Module) -> _FeedForward | None:
    """Return the widths of linear layers that widen and narrow again, if that is all there is in a module.

    The first one widens. A second one that does may be listed after the one that narrows: `w1`, `w2`, `w3`.
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
    """Return the linear layers in a module; None if something else in it mixes features, such as a convolution."""
    linear = _as_linear(module)
    if linear is not None:
        return [linear]
    if any(weight is not None and weight.dim() > 1 for weight in parameters_of(module).values()):
        return None
    found: list[_Linear] = []
    for child in module.children():
        inside = _linears(child)
        if inside is None:
            return None
        found += inside
    return found


def _as_linear(module: nn.Module) -> _Linear | None:
    """Read a layer's widths from its attributes: quantized layers, adapters, and GPT-2's `Conv1D` count as well."""
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        width, height = getattr(module, inputs, None), getattr(module, outputs, None)
        if isinstance(width, int) and isinstance(height, int):
            return _Linear(width, height)
    return None


# --- Blocks with attention, and the norms behind them ----------------------------------------------------------------


def calls_attention(module: nn.Module) -> bool:
    """Return whether a part of a region calls attention where it can be seen."""
    return any(map(asks_for_attention, module.modules()))


class Norm(NamedTuple):
    """A norm outside all regions, behind a stack of them."""

    name: str
    module: nn.Module


def find_norms(model: nn.Module, regions: Sequence[Region]) -> list[tuple[Norm, Region]]:
    """Return the norms beside the stacks that some regions are in, each with a region of its stack."""
    by_parent = {region.name.rpartition(".")[0].rpartition(".")[0]: region for region in regions}
    found = []
    for parent, region in by_parent.items():
        for name, child in model.get_submodule(parent).named_children():
            if _is_norm(child):
                found.append((Norm(".".join(filter(None, [parent, name])), child), region))
    return found


def _is_norm(module: nn.Module) -> bool:
    weight = parameters_of(module).get("weight")
    is_named = "norm" in type(module).__name__.lower() and not isinstance(module, _OVER_BATCH)
    return is_named and weight is not None and weight.dim() == 1 and not any(module.children())


_OVER_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)


# --- The head -------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """The layer that makes logits, and the model that makes a loss of them."""

    name: str
    module: nn.Module
    model: nn.Module


def find_head(model: nn.Module) -> Head:
    """Return the head, found by transformers' convention. Raises `NoRegionError` if there is none.

    A model of any other kind can call `lowtide.linear_cross_entropy` itself.
    """
    for prefix, inner in model.named_modules():
        get_head = getattr(type(inner), "get_output_embeddings", None)
        if get_head is None or "labels" not in inspect.signature(type(inner).forward).parameters:
            continue
        head = get_head(inner)
        for name, module in inner.named_modules():
            if module is head:
                return Head(".".join(filter(None, [prefix, name])), head, inner)
    raise NoRegionError(
        f"tile(loss): {type(model).__name__} has no head that makes a loss from labels (transformers' "
        "get_output_embeddings and forward(labels=...)): call lowtide.linear_cross_entropy where your loss is made, "
        "and use tile(mlp) without the loss"
    )
