"""What a policy costs: the figures of one simulated step, or of two short ones carried on to the whole length."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lowtide.recording import read_peak, read_timeline
from lowtide.simulation.allocator import least_capacity, reserved_bytes
from lowtide.stores.host_memory import pinned_for

if TYPE_CHECKING:
    from lowtide.simulation.extrapolation import Extrapolation
    from lowtide.simulation.step import Recording


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """One policy's figures. Bytes are those of one rank."""

    policy: str
    peak_bytes: int
    """Allocated at the peak."""
    needed_bytes: int
    """The least memory in which a caching allocator gets through the step."""
    reserved_bytes: int
    """What a caching allocator reserves if nothing holds it back."""
    host_bytes: int
    seconds: float
    busy: dict[str, float]
    owners: dict[str, int]
    """Bytes at the peak by kind of owner."""
    phase: str
    region: str
    """When the peak is: the phase of the step, and the region that runs."""
    kernels: dict[str, int]
    exact: bool
    timeline: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    regions: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Bytes at the peak by block and kind of owner."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def exact_estimate(policy: str, recording: Recording) -> Estimate:
    """From a recording of the whole model."""
    peak = read_peak(recording)
    owners: dict[str, int] = {}
    regions: dict[str, dict[str, int]] = {}
    for owner, size in peak.owners.items():
        owners[owner.kind] = owners.get(owner.kind, 0) + size
        by_kind = regions.setdefault(owner.region, {})
        by_kind[owner.kind] = by_kind.get(owner.kind, 0) + size
    reserved = reserved_bytes(recording.events)
    return Estimate(
        policy=policy,
        peak_bytes=peak.nbytes,
        needed_bytes=least_capacity(recording.events, peak.nbytes, reserved),
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
    )


def extrapolated_estimate(policy: str, whole: Extrapolation) -> Estimate:
    """The figures of the whole model from recordings of two short ones."""
    estimates = [exact_estimate(policy, recording) for recording in (whole.short, whole.longer)]
    short, longer = whole.short, whole.longer
    peak, here, owners = whole.highest()
    return Estimate(
        policy=policy,
        peak_bytes=peak,
        needed_bytes=peak + max(estimate.needed_bytes - estimate.peak_bytes for estimate in estimates),
        reserved_bytes=peak + max(estimate.reserved_bytes - estimate.peak_bytes for estimate in estimates),
        host_bytes=pinned_for(round(whole.stack.share(short.stored_bytes, longer.stored_bytes))),
        seconds=whole.stack.share(short.seconds, longer.seconds),
        busy={kind: whole.stack.share(short.busy.get(kind, 0), seconds) for kind, seconds in longer.busy.items()},
        owners=owners,
        phase=here.phase,
        region=here.region,
        kernels=longer.kernels,
        exact=False,
    )
