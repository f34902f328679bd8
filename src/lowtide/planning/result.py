"""A plan: which policies fit, which of them is the fastest, and why the rest do not fit."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from lowtide.errors import LogitsNotComputedError, SilentNoOpError
from lowtide.policy import Policy
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.hardware.accelerators import Accelerator, Margins
    from lowtide.simulation.estimate import Estimate
    from lowtide.simulation.simulator import ModelSummary
    from lowtide.targets.job import Job

KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "saved": "saved activations",
    "working": "activations in work",
    "logits": "logits",
    "workspace": "kernels' workspace",
    "communication": "communication buffers",
    "batch": "the batch",
}
"""Kinds of bytes on the device, in words."""

INAPPLICABLE = (SilentNoOpError, LogitsNotComputedError)
"""The errors of a policy that does nothing to this model, or cannot. The other policies are judged all the same."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy with its figures, and whether it fits."""

    estimate: Estimate
    device_bytes: int
    """Bytes that it needs on the device, including margins."""
    fits: bool
    missing: str = ""
    """How many bytes are missing if it does not fit."""
    is_tight: bool = False
    """Whether it fits, but leaves less of the budget free than the plan's headroom."""
    limit: str
    """What holds most of the memory at the peak, and how many bytes are missing if it does not fit."""

    @property
    def policy(self) -> str:
        return self.estimate.policy

    @property
    def verdict(self) -> str:
        """Return `fits`, `tight` or `no`."""
        return "no" if not self.fits else "tight" if self.is_tight else "fits"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change to the question with which something fits."""

    change: dict[str, Any]
    """Keywords of `lowtide.plan`."""
    policy: str
    device_bytes: int
    """Bytes that this policy then needs on the device, including margins."""

    def __str__(self) -> str:
        change = ", ".join(f"{name}={value!r}" for name, value in self.change.items())
        return f"{change}: {format_bytes(self.device_bytes)} with {self.policy}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to "will it fit, and how?". The ranking is the claim; seconds are an estimate until calibrated."""

    __module__ = "lowtide"

    summary: ModelSummary
    job: Job
    accelerator: Accelerator
    margins: Margins
    budget: int
    """Bytes of device memory that may be used."""
    host_budget: int
    """Bytes of host memory that each rank may use."""
    candidates: list[Candidate]
    """All policies that were simulated, the fastest first; none if the weights alone are more than the budget."""
    best: Candidate | None
    """The recommendation: the simplest that is within 5 % of the fastest. None if none fits."""
    fastest: Candidate | None = None
    """The fastest that fits, which may be the same."""
    headroom: float = 0.0
    """The share of the budget that recommendations leave free, if any policy does."""
    notes: list[str]
    """What a reader should know about how the figures were made."""
    ways_out: list[WayOut] = dataclasses.field(default_factory=list)
    """Where nothing fits: changes to the question with which something does."""
    mean_step: dict[str, Any] | None = None
    """What a step takes on average, if a data set's own lengths were planned."""

    @property
    def fits(self) -> bool:
        return self.best is not None

    @property
    def policy(self) -> Policy | None:
        """Return the best policy, ready for `lowtide.apply`; None if none fits."""
        return Policy.parse(self.best.policy) if self.best else None

    @property
    def least(self) -> Candidate | None:
        """Return the candidate that needs the least device memory; None if nothing was simulated."""
        return min(self.candidates, key=lambda candidate: candidate.device_bytes, default=None)

    @property
    def shown(self) -> Candidate | None:
        """Return the candidate whose figures the plan shows: the best one, or the leanest where none fits."""
        return self.best or self.least

    @property
    def peak_bytes(self) -> int:
        return self.shown.estimate.peak_bytes if self.shown else self.summary.resident_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.shown.estimate.reserved_bytes if self.shown else self.summary.resident_bytes

    @property
    def host_bytes(self) -> int:
        return self.shown.estimate.host_bytes if self.shown else 0

    @property
    def step_seconds(self) -> float | None:
        """Return the seconds of a step; None if nothing was simulated."""
        return self.shown.estimate.seconds if self.shown else None

    @property
    def owners(self) -> dict[str, int]:
        return self.shown.estimate.owners if self.shown else {}

    @property
    def timeline(self) -> list[dict[str, Any]]:
        return self.shown.estimate.timeline if self.shown else []

    @property
    def recommended(self) -> list[tuple[str, Candidate]]:
        """Return what to use, and why: the simplest policy first, then the fastest if that is a different one."""
        if self.best is None or self.fastest is None:
            return []
        if self.best.policy == self.fastest.policy:
            return [("the fastest that fits", self.best)]
        return [("the simplest, within 5 % of the fastest", self.best), ("the fastest that fits", self.fastest)]

    @property
    def why_nothing_fits(self) -> str | None:
        """Return what is too large, in words; None if something fits."""
        if self.fits:
            return None
        if len(self.candidates) == 1:
            return self.candidates[0].limit
        if self.least is not None:
            return f"the least is {self.least.policy}, which {self.least.limit}"
        taken, margins = self.summary.resident_bytes, self.margins.total
        return (
            f"weights and the optimizer's states alone take {format_bytes(taken)}, and the driver and libraries "
            f"{format_bytes(margins)}: more than {format_bytes(self.budget)} before a step begins"
        )

    @property
    def why_not_faster(self) -> str | None:
        """Return why the next faster policy was not taken; None if the fastest of all fits."""
        chosen = self.fastest or self.best
        faster = [
            c for c in self.candidates if (not c.fits or c.is_tight) and (not chosen or _seconds(c) < _seconds(chosen))
        ]
        if not faster:
            return None
        nearest = min(faster, key=lambda candidate: candidate.device_bytes)
        return f"{nearest.policy} would take {format_seconds(_seconds(nearest))}, but {nearest.limit}"

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["fits"] = self.fits
        data["policy"] = None if self.best is None else self.best.policy
        data["step_seconds"] = self.step_seconds
        for name in ("peak_bytes", "reserved_bytes", "host_bytes", "owners", "timeline"):
            data[name] = getattr(self, name)
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return a page with the table, where the memory goes, and the step over time. Needs the `html` extra."""
        from lowtide.planning.page import plan_page

        return plan_page(self)

    @property
    def where(self) -> str:
        """Return the device; if there are several, with their number and how they share the step."""
        ranks, name = self.job.ranks, self.accelerator.name
        return f"{ranks} x {name} ({self.job.parallelism})" if ranks > 1 else name

    def __str__(self) -> str:
        job = self.job
        lines = [f"{self.summary.name} ({self.summary.model_class}), {job.training}, {job.size}, {self.where}:"]
        lines += [
            f"  {c.verdict:5} {format_bytes(c.device_bytes):>10}  {format_seconds(_seconds(c)):>9}  {c.policy}"
            for c in self.candidates
        ]
        lines += [f"  {why}: {candidate.policy}" for why, candidate in self.recommended]
        lines += [f"  nothing fits: {self.why_nothing_fits}"] if not self.fits else []
        lines += [f"  would fit: {way}" for way in self.ways_out]
        return "\n".join(lines)


def _seconds(candidate: Candidate) -> float:
    return candidate.estimate.seconds


def judge(estimate: Estimate, budget: int, host_budget: int, margins: Margins, headroom: float = 0.0) -> Candidate:
    """Hold a policy's figures against the budgets, of which `headroom` should stay free."""
    needed = estimate.needed_bytes + margins.total
    fits_host = estimate.host_bytes <= host_budget
    owner, size = max(estimate.owners.items(), key=lambda pair: pair[1])
    where = f"the {estimate.phase} of {estimate.region}" if estimate.region else f"the {estimate.phase}"
    holder = f"{KINDS.get(owner, owner)} hold {format_bytes(size)} in {where}"
    missing = ""
    if needed > budget:
        missing = format_bytes(needed - budget)
        limit = f"needs {format_bytes(needed)}, {format_bytes(needed - budget)} too much: {holder}"
    elif not fits_host:
        missing = f"{format_bytes(estimate.host_bytes - host_budget)} host"
        limit = f"needs {format_bytes(estimate.host_bytes)} of host memory, and there are {format_bytes(host_budget)}"
    else:
        limit = holder
    fits = needed <= budget and fits_host
    is_tight = fits and needed > budget * (1 - headroom)
    if is_tight:
        limit = f"leaves {format_bytes(budget - needed)} free, less than a headroom of {100 * headroom:.3g} %: {holder}"
    return Candidate(estimate=estimate, device_bytes=needed, fits=fits, missing=missing, is_tight=is_tight, limit=limit)
