"""Shorter models: a long stack repeats itself, so two short ones tell about any length.

A stack's blocks differ in kind: every sixth may attend to everything, the first few may be dense. The pattern is found
from what the blocks are made of, and shorter stacks keep it, with the same beginning and the same end.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.regions import find_regions

if TYPE_CHECKING:
    from collections.abc import Hashable

_LEAST = 2
_POSITIONS = ("idx", "index", "layer_id", "layer_number")


@dataclasses.dataclass(frozen=True)
class Stack:
    """The stack that is cut: where it is, and two lengths that stand for all."""

    name: str
    length: int
    first: int
    """Blocks before the pattern begins."""
    period: int
    short: int
    longer: int

    @classmethod
    def nothing(cls) -> Stack:
        """Of a model that was not cut."""
        return cls("", 0, 0, 1, 0, 0)

    @property
    def steps_beyond(self) -> float:
        """How many times the difference of the two lies between the longer one and the whole."""
        return (self.length - self.longer) / (self.longer - self.short) if self.longer > self.short else 0.0

    def stand_in(self, place: int) -> int:
        """The block of the longer stack that is like a block of the whole: an inner one for an inner one."""
        if place in (0, self.length - 1) or place < self.first:
            return min(self.longer - 1, place)
        inner = range(self.longer - 2, 0, -1)
        return next((other for other in inner if (other - place) % self.period == 0), self.longer - 1)

    def share(self, short: float, longer: float) -> float:
        """A figure of the whole stack from those of the two short ones."""
        return longer + (longer - short) * self.steps_beyond


def find_stack(model: nn.Module) -> Stack | None:
    """The stack with most weights, if it is long enough to be cut."""
    blocks: dict[str, list[nn.Module]] = collections.defaultdict(list)
    for region in find_regions(model):
        blocks[region.name.rpartition(".")[0]].append(region.module)
    name = max(blocks, key=lambda stack: sum(p.numel() for block in blocks[stack] for p in block.parameters()))
    container = model.get_submodule(name)
    if not isinstance(container, nn.ModuleList) or len(container) != len(blocks[name]):
        return None
    first, period = _pattern([_form(block) for block in blocks[name]])
    length = len(blocks[name])
    rest = (length - first) % period
    short = first + rest + period
    while short < _LEAST:
        short += period
    longer = short + max(period, _LEAST)
    return Stack(name, length, first, period, short, longer) if longer < length else None


def shorten(model: nn.Module, stack: Stack, count: int) -> None:
    """Keep the first `count` blocks, which end as the whole stack does."""
    container = model.get_submodule(stack.name)
    del container[count:]  # type: ignore[operator]


def _pattern(forms: list[Hashable]) -> tuple[int, int]:
    """The shortest beginning and period: from the beginning on, every form is that of one period before."""
    count = len(forms)
    best = (count, 1)
    for period in range(1, count + 1):
        first = count
        while first > period and forms[first - 1] == forms[first - 1 - period]:
            first -= 1
        first = 0 if first <= period else first - period
        if first + period < sum(best):
            best = (first, period)
    return best


def _form(block: nn.Module) -> Hashable:
    """What a block is made of, whatever its place."""
    return tuple((name, type(module), _shapes(module), _settings(module)) for name, module in block.named_modules())


def _shapes(module: nn.Module) -> Hashable:
    return tuple((name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None)


def _settings(module: nn.Module) -> Hashable:
    def is_setting(name: str, value: Any) -> bool:
        is_position = any(word in name for word in _POSITIONS)
        return isinstance(value, bool | int | float | str) and not name.startswith("_") and not is_position

    return tuple(sorted((name, repr(value)) for name, value in vars(module).items() if is_setting(name, value)))
