"""Finds the blocks of a model: the units that are recomputed or offloaded as a whole.

A region is, in this order: what the user names; a layer that transformers marks as one
(`GradientCheckpointingLayer`); a block of a stack, that is, of a container with two or more blocks of the same class.
Where the blocks of a stack differ in shape (the stages of a Swin), the stacks inside them are the better regions; a
block beside them that holds no stack (a codec's convolution between residual units) is a region itself.
Nothing is asked of the model: no flag, no base class, no list of names.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
from typing import TYPE_CHECKING

from torch import nn

from lowtide.errors import InvalidValueError, NoRegionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Selector = type[nn.Module] | str


@dataclasses.dataclass(frozen=True)
class Region:
    """A module whose activations are handled as a whole."""

    name: str
    module: nn.Module
    index: int
    """Its place in its stack."""


def find_regions(model: nn.Module, select: Sequence[Selector] | None = None) -> list[Region]:
    """The regions of a model in the order of its modules. Raises `NoRegionError` if there is none."""
    found = _selected(model, select) if select is not None else [*_marked(model), *_stacked(model)]
    if not found:
        raise NoRegionError(
            f"{type(model).__name__} has no stack of repeated blocks to recompute or offload: name its blocks with "
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
    """What the user names, outermost first. A selector that fits nothing would silently do nothing."""
    if isinstance(select, str | type):
        raise InvalidValueError(f"regions is a list, like regions=[{_as_code(select)}]")
    found: list[tuple[str, nn.Module]] = []
    used: set[Selector] = set()
    for name, module in model.named_modules():
        fitting = [selector for selector in select if _fits(name, module, selector)]
        if name and fitting and _is_called(module):
            used.update(fitting)
            if not _is_within(name, [taken for taken, _ in found]):
                found.append((name, module))
    if unused := [selector for selector in select if selector not in used]:
        raise NoRegionError(
            f"no module of {type(model).__name__} that is called fits {', '.join(map(_as_code, unused))}: give class "
            "names, classes or globs on module names. Containers (ModuleList) are not called: name what is in them, "
            "like 'layers.*'"
        )
    return found


def _as_code(selector: Selector) -> str:
    return repr(selector) if isinstance(selector, str) else selector.__name__


def _fits(name: str, module: nn.Module, selector: Selector) -> bool:
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
    """Looked up by name, so that transformers need not be imported."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def _is_within(name: str, parents: list[str]) -> bool:
    return any(name.startswith(f"{parent}.") for parent in parents)


def _stacked(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Blocks of stacks in those parts of the model that have no marked layer."""
    blocks = _blocks(model)
    if blocks and _are_alike(blocks):
        yield from ((f"{prefix}{name}", block) for name, block in blocks)
        return
    names = {name for name, _ in blocks}
    for name, child in model.named_children():
        if _is_marked(child):
            continue
        inside = list(_stacked(child, f"{prefix}{name}."))
        yield from inside or ([(f"{prefix}{name}", child)] if name in names else [])


def _blocks(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a stack: children with parts and parameters of their own, two of them of one class."""
    if not isinstance(container, nn.ModuleList | nn.Sequential) and not _is_numbered(container):
        return []
    blocks = [(name, child) for name, child in container.named_children() if _is_block(child)]
    classes = collections.Counter(type(block) for _, block in blocks)
    return blocks if classes and max(classes.values()) > 1 else []


def _is_numbered(container: nn.Module) -> bool:
    """A dictionary whose keys are numbers (torchtitan's layers) is a stack. Names may be those of towers."""
    return isinstance(container, nn.ModuleDict) and all(name.isdecimal() for name in container)


def _is_block(module: nn.Module) -> bool:
    if not _is_called(module):
        return False
    has_parts = any(True for _ in module.children())
    has_marked = any(_is_marked(inner) for inner in module.modules())
    return has_parts and not has_marked and any(True for _ in module.parameters())


def _is_called(module: nn.Module) -> bool:
    """Not a ModuleList, nor a bare Module that only names its parts (a VQGAN's levels)."""
    own = getattr(type(module), "forward", None)  # TorchScript's cannot be read
    return own is not nn.Module.forward or "forward" in vars(module)


def _are_alike(blocks: list[tuple[str, nn.Module]]) -> bool:
    """Whether most blocks have a twin: the same class and the same shapes of parameters."""
    forms = collections.Counter(
        (type(block), tuple(tuple(parameter.shape) for parameter in block.parameters())) for _, block in blocks
    )
    with_twin = sum(count for count in forms.values() if count > 1)
    return 2 * with_twin > len(blocks)
