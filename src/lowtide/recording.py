"""Records a step as a list of events, and reads figures out of that list.

An event says how many bytes come or go, whose they are, and at which moment of the step. Peaks, owners and timelines
are all read out of the list; nothing else is kept, so a simulated step (`lowtide.simulation`) and a real one
(`lowtide.tracing`) are shown in the same way.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SAMPLES = 400
"""About how many points a timeline has."""


class Owner(NamedTuple):
    """Whose bytes a storage's are."""

    kind: str
    """`weights`, `gradients`, `optimizer`, `activations`, `logits`, `workspace`, `batch`, `communication`."""
    region: str
    """The region whose forward (or backward) made it; empty outside all regions."""


class Moment(NamedTuple):
    """A moment of the step: the phase, and the region that ran (empty outside all regions)."""

    phase: str
    region: str


class Event(NamedTuple):
    """Bytes that come (a positive change) or go; with a change of 0, a storage gets a different owner."""

    change: int
    storage: int
    place: str
    owner: Owner
    moment: Moment
    seconds: float
    stream: str = ""
    """The stream that the bytes were allocated on, whose pool no other stream allocates from; empty for compute."""


class Recorded(Protocol):
    """A step in events, whether it was simulated or traced as it ran."""

    events: list[Event]
    start: int
    """The index of the step's first event; earlier events tell what was there already."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most bytes at once, when that was, and whose they were."""

    nbytes: int
    moment: Moment
    owners: dict[Owner, int]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A point of a timeline: bytes by kind of owner."""

    seconds: float
    moment: Moment
    nbytes: dict[str, int]


class Tally:
    """The live bytes of one place (`device` or `host`) by storage and by owner, replayed event by event."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._storages: dict[int, tuple[int, Owner]] = {}
        self._births: dict[int, Moment] = {}
        self.total = 0
        self.by_owner: collections.Counter[Owner] = collections.Counter()

    def take(self, event: Event) -> None:
        """Replay one event."""
        if event.place != self._place:
            return
        size, owner = self._storages.get(event.storage, (0, event.owner))
        self._births.setdefault(event.storage, event.moment)
        self.by_owner[owner] -= size
        self.total += event.change
        size += event.change
        self.by_owner[event.owner] += size
        self._storages[event.storage] = (size, event.owner)
        if size == 0:
            del self._storages[event.storage], self._births[event.storage]

    def owners(self, now: Moment) -> dict[Owner, int]:
        """Return the live bytes by owner; activations are `working` if they were made at this moment, else `saved`."""
        found: collections.Counter[Owner] = collections.Counter()
        for number, (size, owner) in self._storages.items():
            found[_refined(owner, self._births[number], now)] += size
        return dict(found.most_common())

    def kinds(self) -> dict[str, int]:
        """Return the live bytes by kind of owner."""
        found: collections.Counter[str] = collections.Counter()
        for owner, size in self.by_owner.items():
            found[owner.kind] += size
        return {kind: size for kind, size in found.items() if size}


def _refined(owner: Owner, born: Moment, now: Moment) -> Owner:
    if owner.kind != "activations":
        return owner
    return Owner("working" if born == now else "saved", owner.region)


def read_peak(recording: Recorded, place: str = "device", at: Moment | None = None) -> Peak:
    """Return the highest point of the step, or of one moment of it.

    The list is replayed a second time for the owners: they cost much more to read than a total, so they are read once,
    when the place of the peak is known.
    """
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
    """Return the most bytes at each moment of the step."""
    peaks: dict[Moment, int] = {}
    total = 0
    for position, event in enumerate(recording.events):
        if event.place == place:
            total += event.change
        if position >= recording.start:
            peaks[event.moment] = max(peaks.get(event.moment, 0), total)
    return peaks


def owners_at(recording: Recorded, moment: Moment) -> dict[str, int]:
    """Return the device's bytes by kind of owner, at the highest point of a moment."""
    kinds: collections.Counter[str] = collections.Counter()
    for owner, size in read_peak(recording, at=moment).owners.items():
        kinds[owner.kind] += size
    return dict(kinds)


def read_timeline(
    recording: Recorded, samples: int = SAMPLES, read: Callable[[Tally], dict[str, int]] = Tally.kinds
) -> list[Sample]:
    """Return the device's memory over the step, by kind of owner unless `read` says otherwise.

    The events are divided into stretches of equal length (the last may be shorter), and each gives its highest point.
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


def tensors_in(things: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among `things`, and in lists and tuples among them.

    It is called for every operation, whose arguments are flat but for a list of tensors here and there: a pytree would
    cost much more.
    """
    found: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, list | tuple):
            found += tensors_in(thing)
    return found


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among an operation's arguments."""
    return tensors_in(args) + tensors_in(kwargs.values()) if kwargs else tensors_in(args)
