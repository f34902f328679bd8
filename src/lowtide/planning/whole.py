"""The whole model, from recordings of two shorter ones.

Memory at each place of the step (before the stack, in its first blocks, in its last ones, after it) grows in equal
steps with the length of the stack; which place is the highest may change. So every place is carried on by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.planning.layers import Stack
from lowtide.recording import Moment
from lowtide.recording.reading import owners_at, peaks_by_moment

if TYPE_CHECKING:
    from lowtide.planning.step import Recording

_Place = tuple[str, str, str, int]
"""A phase, a block or a stack; and for a block of the stack that was cut, the nearer end and how far it is."""


class Whole:
    """A model whose stack was cut to two lengths, and simulated."""

    def __init__(self, names: list[str], stack: Stack, short: Recording, longer: Recording) -> None:
        self.names = names
        self.stack = stack
        self.short = short
        self.longer = longer
        self._few = _places(short, stack, stack.short)
        self._many = _places(longer, stack, stack.longer)

    @classmethod
    def exact(cls, names: list[str], recording: Recording) -> Whole:
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
    container, _, number = moment.block.rpartition(".")
    if container != stack.name or not number.isdigit():
        return moment.phase, moment.block, "", 0
    from_end = count - 1 - int(number)
    if int(number) <= from_end:
        return moment.phase, container, "first", int(number)
    return moment.phase, container, "last", from_end
