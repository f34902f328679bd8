"""Shorter models: a long stack repeats itself, so two short ones tell about any length.

A stack's blocks differ in kind: every sixth may attend to everything, the first few may be dense. The pattern is found
from what the blocks are made of, and shorter stacks keep it, with the same beginning and the same end.

The whole model, from recordings of two shorter ones.

Memory at each place of the step (before the stack, in its first blocks, in its last ones, after it) grows in equal
steps with the length of the stack; which place is the highest may change. So every place is carried on by itself.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide._torch import parameters_of
from lowtide.recording import Moment, owners_at, peaks_by_moment
from lowtide.regions import find_regions

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lowtide.simulation.step import Recording

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
    return tuple((name, tuple(p.shape)) for name, p in parameters_of(module).items() if p is not None)


def _settings(module: nn.Module) -> Hashable:
    def is_setting(name: str, value: Any) -> bool:
        is_position = any(word in name for word in _POSITIONS)
        return isinstance(value, bool | int | float | str) and not name.startswith("_") and not is_position

    return tuple(sorted((name, repr(value)) for name, value in vars(module).items() if is_setting(name, value)))


_Place = tuple[str, str, str, int]
"""A phase, a block or a stack; and for a block of the stack that was cut, the nearer end and how far it is."""


class Extrapolation:
    """A model whose stack was cut to two lengths, and simulated."""

    def __init__(self, names: list[str], stack: Stack, short: Recording, longer: Recording) -> None:
        self.names = names
        self.stack = stack
        self.short = short
        self.longer = longer
        self._few = _places(short, stack, stack.short)
        self._many = _places(longer, stack, stack.longer)

    @classmethod
    def exact(cls, names: list[str], recording: Recording) -> Extrapolation:
        """A model that was simulated as it is."""
        return cls(names, Stack.nothing(), recording, recording)

    def highest(self) -> tuple[int, Moment, dict[str, int]]:
        """The peak, the moment of it in the whole model, and the owners there."""
        peaks = {place: self._carried(place) for place in self._many}
        place = max(peaks, key=lambda key: peaks[key])
        return round(peaks[place]), self._moment(place), self._owners(place)

    def _moment(self, place: _Place) -> Moment:
        phase, block, end, distance = place
        if not end:
            return Moment(phase, block)
        return Moment(phase, f"{block}.{distance if end == 'first' else self.stack.length - 1 - distance}")

    def peak(self, phase: str, region: str) -> int:
        """The most bytes in a phase of a region of the whole model; of inner blocks, in proportion.

        The phase "between" is from the last region's forward to the first one's backward.
        """
        if phase == "between":
            return max(self._outside("forward"), self._outside("backward"))
        if phase == "optimizer":
            return self._outside("optimizer")
        container, _, number = region.rpartition(".")
        if container != self.stack.name:
            place = (phase, region, "", 0)
            return round(self._carried(place)) if place in self._many else 0
        return round(self._at(phase, int(number)))

    def stand_in(self, region: str) -> str:
        """The region of the longer model that is like a region of the whole one."""
        container, _, number = region.rpartition(".")
        return f"{container}.{self.stack.stand_in(int(number))}" if container == self.stack.name else region

    def _outside(self, phase: str) -> int:
        place = (phase, "", "", 0)
        return round(self._carried(place)) if place in self._many else 0

    def _at(self, phase: str, number: int) -> float:
        known = {
            (distance if end == "first" else self.stack.length - 1 - distance): self._carried(place)
            for place in self._many
            for kind, container, end, distance in [place]
            if (kind, container) == (phase, self.stack.name)
        }
        if not known:
            return 0.0
        before = max((place for place in known if place <= number), default=min(known))
        after = min((place for place in known if place >= number), default=max(known))
        if before == after:
            return known[before]
        return known[before] + (known[after] - known[before]) * (number - before) / (after - before)

    def _carried(self, place: _Place) -> float:
        return self._many[place][0] + self.stack.steps_beyond * self._growth(place)

    def _growth(self, place: _Place) -> int:
        """How much a place grew from the shorter stack to the longer one."""
        known = self._nearest(place)
        return self._many[known][0] - self._few[known][0] if known is not None else 0

    def _owners(self, place: _Place) -> dict[str, int]:
        owners = owners_at(self.longer, self._many[place][1])
        known = self._nearest(place)
        if known is None:
            return owners
        more, less = owners_at(self.longer, self._many[known][1]), owners_at(self.short, self._few[known][1])
        steps = self.stack.steps_beyond
        return {kind: size + round(steps * (more.get(kind, 0) - less.get(kind, 0))) for kind, size in owners.items()}

    def _nearest(self, place: _Place) -> _Place | None:
        """The place itself, or the one next to it towards the end of the stack, that both recordings have."""
        phase, block, end, distance = place
        outward = ((phase, block, end, candidate) for candidate in range(distance, -1, -1))
        other = ((phase, block, side, 0) for side in ("first", "last"))
        both = (candidate for candidate in (*outward, *other) if candidate in self._few and candidate in self._many)
        return next(both, None)


def _places(recording: Recording, stack: Stack, count: int) -> dict[_Place, tuple[int, Moment]]:
    return {_place(moment, stack, count): (size, moment) for moment, size in peaks_by_moment(recording).items()}


def _place(moment: Moment, stack: Stack, count: int) -> _Place:
    container, _, number = moment.region.rpartition(".")
    if container != stack.name or not number.isdigit():
        return moment.phase, moment.region, "", 0
    from_end = count - 1 - int(number)
    if int(number) <= from_end:
        return moment.phase, container, "first", int(number)
    return moment.phase, container, "last", from_end
