"""Extrapolates a long model from two short ones: a stack of layers repeats itself, so two lengths tell about any.

A stack's layers differ in kind: every sixth may attend to everything, the first few may be dense. `find_stack` finds
the pattern from what the layers are made of, and truncated stacks keep it: they begin and end as the whole one does.

Memory at each place of the step (before the stack, in its first layers, in its last ones, after it) grows in equal
steps with the length of the stack, but which place is the highest may change with the length. So `Extrapolation`
extrapolates each place by itself, and then looks for the highest.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from lowtide._torch import parameters_of
from lowtide.recording import Moment, owners_at, peaks_by_moment
from lowtide.regions import find_regions

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lowtide.simulation.step import Recording

_LEAST = 3
"""The fewest layers of a truncated stack: with two, no layer has copies of two others in flight beside its own."""

_POSITIONS = ("idx", "index", "layer_id", "layer_number")
"""Words in the names of attributes that tell a layer's place in its stack."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """The stack that is truncated: where it is, its pattern, and the two lengths that stand for all."""

    name: str
    length: int
    prefix: int
    """How many layers come before the pattern begins."""
    period: int
    """After how many layers the pattern repeats."""
    short: int
    long: int
    """The two lengths that are simulated."""

    @classmethod
    def empty(cls) -> Stack:
        """Return the stack of a model that is not truncated."""
        return cls("", 0, 0, 1, 0, 0)

    @property
    def steps_past_long(self) -> float:
        """Return the distance from the long stack to the whole one, in steps from the short stack to the long one."""
        return (self.length - self.long) / (self.long - self.short) if self.long > self.short else 0.0

    def extrapolate(self, short: float, long: float) -> float:
        """Return a figure of the whole stack from the figures of the short and the long one."""
        return long + (long - short) * self.steps_past_long

    def layer_of(self, region: str) -> int | None:
        """Return a region's number in this stack; None if it is not one of its layers.

        The empty stack has none, though regions of a model that is a stack itself (`0`, `1`) lie in no named container.
        """
        container, _, number = region.rpartition(".")
        return int(number) if self.length and container == self.name and number.isdigit() else None

    def representative(self, layer: int) -> int:
        """Return the layer of the long stack that is like a layer of the whole one: an inner one for an inner one."""
        if layer in (0, self.length - 1) or layer < self.prefix:
            return min(self.long - 1, layer)
        inner = range(self.long - 2, 0, -1)
        return next((other for other in inner if (other - layer) % self.period == 0), self.long - 1)


def find_stack(model: nn.Module) -> Stack | None:
    """Return the stack with the most weights, if it is long enough to be truncated."""
    stacks: dict[str, list[nn.Module]] = collections.defaultdict(list)
    for region in find_regions(model):
        stacks[region.name.rpartition(".")[0]].append(region.module)
    name = max(stacks, key=lambda stack: sum(p.numel() for layer in stacks[stack] for p in layer.parameters()))
    container = model.get_submodule(name)
    if not isinstance(container, nn.ModuleList) or len(container) != len(stacks[name]):
        return None
    prefix, period = _find_pattern([_form(layer) for layer in stacks[name]])
    length = len(stacks[name])
    rest = (length - prefix) % period
    short = prefix + rest + period
    while short < _LEAST:
        short += period
    long = short + max(period, 2)
    return Stack(name, length, prefix, period, short, long) if long < length else None


def truncate(model: nn.Module, stack: Stack, count: int) -> None:
    """Keep the first `count` layers of a stack: `stack.short` and `stack.long` of them end as the whole stack does."""
    container = model.get_submodule(stack.name)
    del container[count:]  # type: ignore[operator]


def _find_pattern(forms: list[Hashable]) -> tuple[int, int]:
    """Return the shortest prefix and period: after the prefix, every form is the same as one period before it."""
    count = len(forms)
    best = (count, 1)
    for period in range(1, count + 1):
        prefix = count
        while prefix > period and forms[prefix - 1] == forms[prefix - 1 - period]:
            prefix -= 1
        prefix = 0 if prefix <= period else prefix - period
        if prefix + period < sum(best):
            best = (prefix, period)
    return best


def _form(layer: nn.Module) -> Hashable:
    """Describe what a layer is made of, whatever its place in the stack."""
    return tuple((name, type(module), _shapes(module), _settings(module)) for name, module in layer.named_modules())


def _shapes(module: nn.Module) -> Hashable:
    return tuple((name, tuple(p.shape)) for name, p in parameters_of(module).items() if p is not None)


def _settings(module: nn.Module) -> Hashable:
    def is_setting(name: str, value: Any) -> bool:
        is_position = any(word in name for word in _POSITIONS)
        return isinstance(value, bool | int | float | str) and not name.startswith("_") and not is_position

    return tuple(sorted((name, repr(value)) for name, value in vars(module).items() if is_setting(name, value)))


class _Place(NamedTuple):
    """A place of the step that models of any length have."""

    phase: str
    region: str
    """A region; for a layer of the truncated stack, the stack."""
    end: str = ""
    """The nearer end of the truncated stack, `first` or `last`; empty for everything else."""
    distance: int = 0
    """How many layers lie between it and that end."""


class Extrapolation:
    """A model's memory, from recordings of the model with its stack truncated to two lengths."""

    def __init__(self, names: list[str], stack: Stack, short: Recording, long: Recording) -> None:
        self.names = names
        """The regions of the whole model."""
        self.stack = stack
        self.short = short
        self.long = long
        self._short_peaks = _peaks_by_place(short, stack, stack.short)
        self._long_peaks = _peaks_by_place(long, stack, stack.long)

    @classmethod
    def exact(cls, names: list[str], recording: Recording) -> Extrapolation:
        """Wrap a recording of the whole model, of which nothing is extrapolated."""
        return cls(names, Stack.empty(), recording, recording)

    def step_peak(self) -> tuple[int, Moment, dict[str, int]]:
        """Return the whole model's peak: its bytes, its moment, and the bytes by kind of owner."""
        peaks = {place: self._extrapolated_peak(place) for place in self._long_peaks}
        place = max(peaks, key=lambda key: peaks[key])
        return round(peaks[place]), self._moment(place), self._owners(place)

    def phase_peak(self, phase: str, region: str = "") -> int:
        """Return the most bytes in a phase of a region of the whole model.

        Between the layers that were recorded, the bytes are interpolated. The phase `between` is from the last region's
        forward to the first one's backward; it and `optimizer` have no region.
        """
        if phase == "between":
            return max(self._peak_at(_Place("forward", "")), self._peak_at(_Place("backward", "")))
        if phase == "optimizer":
            return self._peak_at(_Place("optimizer", ""))
        layer = self.stack.layer_of(region)
        return self._peak_at(_Place(phase, region)) if layer is None else round(self._interpolated_peak(phase, layer))

    def representative(self, region: str) -> str:
        """Return the region of the long model that is like a region of the whole one."""
        layer = self.stack.layer_of(region)
        return region if layer is None else f"{self.stack.name}.{self.stack.representative(layer)}"

    def _peak_at(self, place: _Place) -> int:
        return round(self._extrapolated_peak(place)) if place in self._long_peaks else 0

    def _interpolated_peak(self, phase: str, layer: int) -> float:
        known = {
            self._layer(place): self._extrapolated_peak(place)
            for place in self._long_peaks
            if (place.phase, place.region) == (phase, self.stack.name)
        }
        if not known:
            return 0.0
        before = max((other for other in known if other <= layer), default=min(known))
        after = min((other for other in known if other >= layer), default=max(known))
        if before == after:
            return known[before]
        return known[before] + (known[after] - known[before]) * (layer - before) / (after - before)

    def _extrapolated_peak(self, place: _Place) -> float:
        return self._long_peaks[place][0] + self.stack.steps_past_long * self._growth(place)

    def _growth(self, place: _Place) -> int:
        """Return how much a place grew from the short stack to the long one."""
        known = self._nearest_in_both(place)
        return self._long_peaks[known][0] - self._short_peaks[known][0] if known is not None else 0

    def _owners(self, place: _Place) -> dict[str, int]:
        owners = owners_at(self.long, self._long_peaks[place][1])
        known = self._nearest_in_both(place)
        if known is None:
            return owners
        more, less = (
            owners_at(self.long, self._long_peaks[known][1]),
            owners_at(self.short, self._short_peaks[known][1]),
        )
        steps = self.stack.steps_past_long
        return {kind: size + round(steps * (more.get(kind, 0) - less.get(kind, 0))) for kind, size in owners.items()}

    def _nearest_in_both(self, place: _Place) -> _Place | None:
        """Return the place that both recordings have: itself, or the nearest one towards the end of the stack."""
        towards_end = (place._replace(distance=distance) for distance in range(place.distance, -1, -1))
        ends = (place._replace(end=end, distance=0) for end in ("first", "last"))
        candidates = (*towards_end, *ends)
        return next((other for other in candidates if other in self._short_peaks and other in self._long_peaks), None)

    def _moment(self, place: _Place) -> Moment:
        return Moment(place.phase, f"{place.region}.{self._layer(place)}" if place.end else place.region)

    def _layer(self, place: _Place) -> int:
        """Return the number that a place of the truncated stack has in the whole one."""
        return place.distance if place.end == "first" else self.stack.length - 1 - place.distance


def _peaks_by_place(recording: Recording, stack: Stack, count: int) -> dict[_Place, tuple[int, Moment]]:
    return {_place_of(moment, stack, count): (size, moment) for moment, size in peaks_by_moment(recording).items()}


def _place_of(moment: Moment, stack: Stack, count: int) -> _Place:
    layer = stack.layer_of(moment.region)
    if layer is None:
        return _Place(moment.phase, moment.region)
    from_end = count - 1 - layer
    if layer <= from_end:
        return _Place(moment.phase, stack.name, "first", layer)
    return _Place(moment.phase, stack.name, "last", from_end)
