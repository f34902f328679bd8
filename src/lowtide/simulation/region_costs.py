"""What each treatment of a region costs: memory that waits, memory in work, seconds, and bytes over the link.

Read from recordings of the four uniform policies. What a region holds while others run, and what it needs while it runs
itself, are told apart by the owners in the ledger; everything else at that moment is the same for all treatments.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lowtide.recording import Moment, Owner, Tally

if TYPE_CHECKING:
    from lowtide.simulation.extrapolation import Extrapolation
    from lowtide.simulation.step import Recording

REGION_POLICIES = ("none", "recompute", "offload", "recompute+offload")

_OWN = frozenset({"activations", "logits", "workspace"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionPolicyCost:
    """Of one region under one treatment."""

    waiting: int
    """Bytes on the device from its forward to its backward."""
    forward_bytes: int
    backward_bytes: int
    """Bytes that it needs while it runs, those that waited included."""
    forward_seconds: float
    backward_seconds: float
    """With what compute waits for copies, where all regions are treated alike."""
    moved: int
    """Bytes that go to the host and come back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionCosts:
    """One region of the whole model."""

    name: str
    forward_base: int
    backward_base: int
    """Bytes of everything else while it runs, but for what other regions wait with."""
    treatments: dict[str, RegionPolicyCost]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A step as the solver sees it."""

    regions: list[RegionCosts]
    between_base: int
    """The most bytes between the last forward and the first backward (the loss), without what regions wait with."""
    after_bytes: int
    """The most bytes after backward (the optimizer)."""
    other_seconds: float
    """Seconds outside of all regions."""


def region_costs(whole: Extrapolation, recordings: dict[str, Recording]) -> StepCosts:
    """Costs of all regions of the whole model. `recordings` are by treatment, all of the same (shortened) length.

    `whole` knows the memory of the untreated model at any region. What is left of it without the region's own bytes,
    and without what the regions before it wait with, is the base that all treatments share.
    """
    readings = {treatment: _Reading(recording) for treatment, recording in recordings.items()}
    keep = readings["none"]
    found: list[RegionCosts] = []
    waiting = 0
    for name in whole.names:
        stand_in = whole.stand_in(name)
        if not keep.ran(stand_in):
            continue  # a tower without its input: no treatment costs anything
        costs = {treatment: reading.cost(stand_in) for treatment, reading in readings.items()}
        found.append(
            RegionCosts(
                name=name,
                forward_base=whole.peak("forward", name) - waiting - costs["none"].forward_bytes,
                backward_base=whole.peak("backward", name) - waiting - costs["none"].backward_bytes,
                treatments=costs,
            )
        )
        waiting += costs["none"].waiting
    return StepCosts(
        regions=found,
        between_base=whole.peak("between", "") - waiting,
        after_bytes=whole.peak("optimizer", ""),
        other_seconds=keep.other_seconds,
    )


class _Reading:
    """One recording, by region."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._waiting: dict[str, int] = {}
        self._own: dict[Moment, int] = {}
        self._read()

    def ran(self, region: str) -> bool:
        return Moment("forward", region) in self._own

    def cost(self, region: str) -> RegionPolicyCost:
        seconds = self._recording.region_seconds
        return RegionPolicyCost(
            waiting=self._waiting.get(region, 0),
            forward_bytes=self._own.get(Moment("forward", region), 0),
            backward_bytes=self._own.get(Moment("backward", region), 0),
            forward_seconds=seconds.get("forward", {}).get(region, 0.0),
            backward_seconds=seconds.get("backward", {}).get(region, 0.0),
            moved=self._recording.packed.get(region, 0),
        )

    @property
    def other_seconds(self) -> float:
        inside = sum(sum(seconds.values()) for seconds in self._recording.region_seconds.values())
        return max(0.0, self._recording.seconds - inside)

    def _read(self) -> None:
        tally = Tally("device")
        most: dict[Moment, int] = {}
        phase = ""
        for position, event in enumerate(self._recording.events):
            if position >= self._recording.start:
                if event.moment.phase == "backward" and phase == "forward":
                    self._waiting = {owner.region: 0 for owner in tally.by_owner}
                    for owner, size in tally.by_owner.items():
                        if owner.kind in _OWN:
                            self._waiting[owner.region] += size
                phase = event.moment.phase
            tally.take(event)
            if position >= self._recording.start and tally.total > most.get(event.moment, 0):
                most[event.moment] = tally.total
                block = event.moment.region
                self._own[event.moment] = sum(tally.by_owner[Owner(kind, block)] for kind in _OWN)
