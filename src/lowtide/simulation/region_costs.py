"""Costs of each region under each policy: memory while it waits, memory while it runs, seconds, bytes over the link.

They are read from recordings of the uniform policies. The owners in the ledger tell what a region holds while
other regions run from what it needs while it runs itself; everything else at that moment is the same for all policies.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lowtide.policy import Policy
from lowtide.recording import Moment, Owner, Tally

if TYPE_CHECKING:
    from lowtide.simulation.extrapolation import Extrapolation
    from lowtide.simulation.step import Recording

REGION_POLICIES = (
    "none",
    "recompute",
    "recompute(keep=attention)",
    "offload",
    "recompute+offload",
    "recompute(keep=attention)+offload",
)
"""The policies that a region can have in a plan."""

TILED_REGION_POLICIES = tuple(policy for policy in REGION_POLICIES if "recompute" in policy)
"""The same where whole blocks run in tiles. A tiled block is run again in backward in any case, so to recompute it
costs nothing, and saves its keys and values."""


def region_policies(tile: str) -> tuple[str, ...]:
    """Return the policies that a region can have with a tile option."""
    return TILED_REGION_POLICIES if "attention" in Policy.parse(tile or "none").tile else REGION_POLICIES


_OWN = frozenset({"activations", "logits", "workspace"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionPolicyCost:
    """What one region costs under one policy."""

    waiting: int
    """Bytes on the device from its forward to its backward."""
    forward_bytes: int
    backward_bytes: int
    """Bytes that it needs while it runs, including those that waited."""
    forward_seconds: float
    backward_seconds: float
    """Seconds of compute, including waits for copies where all regions have the same policy."""
    moved: int
    """Bytes that go to the host and come back."""
    kept: int = 0
    """How many outputs it keeps instead of computing them again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionCosts:
    """What one region of the whole model costs under each policy."""

    name: str
    forward_base: int
    backward_base: int
    """Bytes of everything else while it runs, without what other regions hold while they wait."""
    by_policy: dict[str, RegionPolicyCost]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A training step as the solver sees it."""

    regions: list[RegionCosts]
    between_base: int
    """The most bytes between the last forward and the first backward (the loss), without what regions hold then."""
    after_bytes: int
    """The most bytes after backward (the optimizer)."""
    other_seconds: float
    """Seconds outside all regions."""


def region_costs(model: Extrapolation, recordings: dict[str, Recording], base: str = "none") -> StepCosts:
    """Return the costs of all regions of the whole model. `recordings` are by policy, all of the same (short) length.

    `model` knows the whole model's memory at any region under the policy `base`. What is left of it without the
    region's own bytes, and without what the regions before it hold while they wait, is the base that all policies
    share.
    """
    by_policy = {policy: _RegionReader(recording) for policy, recording in recordings.items()}
    plain = by_policy[base]
    found: list[RegionCosts] = []
    waiting = 0
    for name in model.names:
        recorded = model.representative(name)
        if not plain.ran(recorded):
            continue  # a tower without its input: no policy costs anything
        costs = {policy: reader.cost(recorded) for policy, reader in by_policy.items()}
        found.append(
            RegionCosts(
                name=name,
                forward_base=model.phase_peak("forward", name) - waiting - costs[base].forward_bytes,
                backward_base=model.phase_peak("backward", name) - waiting - costs[base].backward_bytes,
                by_policy=costs,
            )
        )
        waiting += costs[base].waiting
    return StepCosts(
        regions=found,
        between_base=model.phase_peak("between") - waiting,
        after_bytes=model.phase_peak("optimizer"),
        other_seconds=plain.other_seconds,
    )


class _RegionReader:
    """Reads one recording's figures by region."""

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
            kept=self._recording.kept.get(region, 0),
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
                region = event.moment.region
                self._own[event.moment] = sum(tally.by_owner[Owner(kind, region)] for kind in _OWN)
