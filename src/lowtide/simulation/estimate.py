"""Reads a policy's figures out of one simulated step, or out of two short ones, extrapolated to the whole model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lowtide.recording import peaks_by_moment, read_peak, read_timeline
from lowtide.simulation.allocator import least_capacity, least_expandable_capacity, requests_of, reserved_bytes
from lowtide.stores.host_memory import pinned_for

if TYPE_CHECKING:
    from lowtide.simulation.extrapolation import Extrapolation
    from lowtide.simulation.step import Recording


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one policy costs: bytes of one rank, and seconds of a step."""

    policy: str
    peak_bytes: int
    """Allocated at the peak."""
    needed_bytes: int
    """The least memory in which a caching allocator gets through the step."""
    reserved_bytes: int
    """What a caching allocator reserves if its memory has no limit."""
    host_bytes: int
    seconds: float
    busy: dict[str, float]
    """Seconds of work by kind of kernel, and by direction of the link."""
    owners: dict[str, int]
    """Bytes at the peak by kind of owner."""
    phase: str
    region: str
    """When the peak is: the phase of the step, and the region that runs."""
    kernels: dict[str, int]
    """How often each attention kernel was chosen."""
    exact: bool
    """Whether every layer was simulated; if not, the figures are extrapolated."""
    timeline: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    regions: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Bytes at the peak by region and kind of owner."""
    left_alone: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Why blocks do not run in tiles as the policy says, and which of those that were simulated."""
    runs_whole: bool = False
    """Whether every module that is to run in tiles, except the loss, was too short to be cut."""
    traffic: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """How often ranks that share a batch exchange something, and how many bytes one rank sends, by phase and kind."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def exact_estimate(policy: str, recording: Recording) -> Estimate:
    """Read a policy's figures from a recording of the whole model."""
    peak = read_peak(recording)
    owners: dict[str, int] = {}
    regions: dict[str, dict[str, int]] = {}
    for owner, size in peak.owners.items():
        owners[owner.kind] = owners.get(owner.kind, 0) + size
        by_kind = regions.setdefault(owner.region, {})
        by_kind[owner.kind] = by_kind.get(owner.kind, 0) + size
    needed, reserved = _allocator_bytes(recording, peak.nbytes)
    return Estimate(
        policy=policy,
        peak_bytes=peak.nbytes,
        needed_bytes=needed,
        reserved_bytes=reserved,
        host_bytes=pinned_for(recording.stored_bytes),
        seconds=recording.seconds,
        busy=recording.busy,
        owners=owners,
        phase=peak.moment.phase,
        region=peak.moment.region,
        kernels=recording.kernels,
        exact=True,
        timeline=[
            {"seconds": s.seconds, "phase": s.moment.phase, "region": s.moment.region, "bytes": s.nbytes}
            for s in read_timeline(recording)
        ],
        regions=regions,
        left_alone=recording.left_alone,
        runs_whole=recording.runs_whole,
        traffic=recording.traffic,
    )


def extrapolated_estimate(policy: str, model: Extrapolation) -> Estimate:
    """Read a policy's figures from recordings of two truncated models, extrapolated to the whole one.

    What an allocator needs above the peak is taken from the worse of the two: it does not grow with the stack.
    """
    needed, reserved = map(max, zip(*(_above_peak(recording) for recording in (model.short, model.long)), strict=True))
    short, long, extrapolate = model.short, model.long, model.stack.extrapolate
    peak, moment, owners = model.step_peak()
    return Estimate(
        policy=policy,
        peak_bytes=peak,
        needed_bytes=peak + needed,
        reserved_bytes=peak + reserved,
        host_bytes=pinned_for(round(extrapolate(short.stored_bytes, long.stored_bytes))),
        seconds=extrapolate(short.seconds, long.seconds),
        busy={kind: extrapolate(short.busy.get(kind, 0), seconds) for kind, seconds in long.busy.items()},
        owners=owners,
        phase=moment.phase,
        region=moment.region,
        kernels=long.kernels,
        exact=False,
        left_alone=long.left_alone,
        runs_whole=long.runs_whole,
        traffic={
            kind: {
                figure: round(extrapolate(short.traffic.get(kind, {}).get(figure, 0), number))
                for figure, number in figures.items()
            }
            for kind, figures in long.traffic.items()
        },
    )


def _above_peak(recording: Recording) -> tuple[int, int]:
    """Return what a caching allocator needs above the allocated peak, and what it reserves without a limit."""
    peak = max(peaks_by_moment(recording).values())
    needed, reserved = _allocator_bytes(recording, peak)
    return needed - peak, reserved - peak


def _allocator_bytes(recording: Recording, peak: int) -> tuple[int, int]:
    """Return the least capacity with which a caching allocator gets through, and what it reserves without a limit."""
    requests, expandable = requests_of(recording), recording.expandable_segments
    reserved = reserved_bytes(requests, expandable=expandable)
    least = least_expandable_capacity if expandable else least_capacity
    return least(requests, peak, reserved), reserved
