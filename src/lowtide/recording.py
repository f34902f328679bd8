"""The words of a recording: an event, whose bytes it moves, and the moment of the step.

A recording is a list of events in order. Peaks, owners and timelines are read out of that list (`reading`); nothing
else is kept, so whatever writes events, a simulated step or a real one, is shown in the same way.

The tensors of an operation. Its arguments are a flat tuple, with a list of tensors here and there.

Reads figures out of a recording: peaks, who holds them, and how memory went over time.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Owner(NamedTuple):
    """Who a storage belongs to."""

    kind: str
    """`weights`, `gradients`, `optimizer`, `activations`, `logits`, `workspace`, `batch`, `communication`."""
    region: str
    """The region whose forward (or backward) made it; empty outside of all regions."""


class Moment(NamedTuple):
    """When something happened: the phase of the step, and the region that ran."""

    phase: str
    region: str


class Event(NamedTuple):
    """Bytes come (a positive change) or go; with no change, a storage gets another owner."""

    change: int
    storage: int
    place: str
    owner: Owner
    moment: Moment
    seconds: float


def tensors_in(things: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among `things`, and in lists and tuples among them. For every operation, so it is no pytree."""
    found: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, list | tuple):
            found += tensors_in(thing)
    return found


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return tensors_in(args) + tensors_in(kwargs.values()) if kwargs else tensors_in(args)


SAMPLES = 400
"""Points of a timeline, about."""


class Recorded(Protocol):
    """A step in events: simulated, or traced as it ran."""

    events: list[Event]
    start: int
    """The first event of the step itself; what is before it was there already."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most bytes at once, when that was, and whose they were."""

    nbytes: int
    moment: Moment
    owners: dict[Owner, int]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A point of the timeline: bytes by kind of owner."""

    seconds: float
    moment: Moment
    nbytes: dict[str, int]


class Tally:
    """Live bytes of one place by storage and by owner, replayed event by event."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._storages: dict[int, tuple[int, Owner]] = {}
        self.births: dict[int, Moment] = {}
        self.total = 0
        self.by_owner: collections.Counter[Owner] = collections.Counter()

    def take(self, event: Event) -> None:
        if event.place != self._place:
            return
        size, owner = self._storages.get(event.storage, (0, event.owner))
        self.births.setdefault(event.storage, event.moment)
        self.by_owner[owner] -= size
        self.total += event.change
        size += event.change
        self.by_owner[event.owner] += size
        self._storages[event.storage] = (size, event.owner)
        if size == 0:
            del self._storages[event.storage], self.births[event.storage]

    def owners(self, now: Moment) -> dict[Owner, int]:
        """What is alive, where activations of earlier moments are told apart from those in work."""
        found: collections.Counter[Owner] = collections.Counter()
        for number, (size, owner) in self._storages.items():
            found[_refined(owner, self.births[number], now)] += size
        return dict(found.most_common())

    def kinds(self) -> dict[str, int]:
        found: collections.Counter[str] = collections.Counter()
        for owner, size in self.by_owner.items():
            found[owner.kind] += size
        return {kind: size for kind, size in found.items() if size}


def _refined(owner: Owner, born: Moment, now: Moment) -> Owner:
    if owner.kind != "activations":
        return owner
    return Owner("working" if born == now else "saved", owner.region)


def read_peak(recording: Recorded, place: str = "device") -> Peak:
    """The peak of the step itself."""
    return _highest(recording, place)


def _highest(recording: Recorded, place: str, at: Moment | None = None) -> Peak:
    """The highest point of the step, or of one moment of it. Owners are looked at once it is known."""
    tally, best, where = Tally(place), -1, -1
    for position, event in enumerate(recording.events):
        tally.take(event)
        if position >= recording.start and tally.total > best and at in (None, event.moment):
            best, where = tally.total, position
    if where < 0:
        return Peak(0, Moment("forward", ""), {})
    again = Tally(place)
    for event in recording.events[: where + 1]:
        again.take(event)
    moment = recording.events[where].moment
    return Peak(best, moment, again.owners(moment))


def peaks_by_moment(recording: Recorded, place: str = "device") -> dict[Moment, int]:
    """The most bytes at each moment of the step."""
    peaks: dict[Moment, int] = {}
    total = 0
    for position, event in enumerate(recording.events):
        if event.place == place:
            total += event.change
        if position >= recording.start:
            peaks[event.moment] = max(peaks.get(event.moment, 0), total)
    return peaks


def owners_at(recording: Recorded, moment: Moment) -> dict[str, int]:
    """Bytes by kind of owner at the highest point of a moment."""
    kinds: collections.Counter[str] = collections.Counter()
    for owner, size in _highest(recording, "device", moment).owners.items():
        kinds[owner.kind] += size
    return dict(kinds)


def read_timeline(
    recording: Recorded, samples: int = SAMPLES, read: Callable[[Tally], dict[str, int]] = Tally.kinds
) -> list[Sample]:
    """Device memory over the step, by kind unless `read` says otherwise: of each stretch of events, the highest point.

    The last stretch may be shorter.
    """
    count = len(recording.events) - recording.start
    stretch = max(1, count // samples)
    tally = Tally("device")
    found: list[Sample] = []
    best: Sample | None = None
    most = -1
    for position, event in enumerate(recording.events):
        tally.take(event)
        if position < recording.start:
            continue
        if tally.total > most:
            most, best = tally.total, Sample(event.seconds, event.moment, read(tally))
        if (position - recording.start + 1) % stretch == 0 and best is not None:
            found.append(best)
            most = -1
    if most >= 0 and best is not None:
        found.append(best)
    return found
