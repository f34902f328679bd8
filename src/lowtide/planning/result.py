"""A plan: which policies fit, which of them is the fastest, and why the rest do not fit."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from lowtide.errors import LogitsNotComputedError, SilentNoOpError
from lowtide.policy import Policy
from lowtide.units import format_bytes

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
    limit: str
    """What holds most of the memory at the peak, and how many bytes are missing if it does not fit."""

    @property
    def policy(self) -> str:
        return self.estimate.policy

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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
    """All policies that were simulated, the fastest first."""
    best: Candidate | None
    """The fastest that fits; None if none does."""
    notes: list[str]
    """What a reader should know about how the figures were made."""
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
    def least(self) -> Candidate:
        """Return the candidate that needs the least device memory."""
        return min(self.candidates, key=lambda candidate: candidate.device_bytes)

    @property
    def shown(self) -> Candidate:
        """Return the candidate whose figures the plan shows: the best one, or the leanest where none fits."""
        return self.best or self.least

    @property
    def peak_bytes(self) -> int:
        return self.shown.estimate.peak_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.shown.estimate.reserved_bytes

    @property
    def host_bytes(self) -> int:
        return self.shown.estimate.host_bytes

    @property
    def step_seconds(self) -> float:
        return self.shown.estimate.seconds

    @property
    def owners(self) -> dict[str, int]:
        return self.shown.estimate.owners

    @property
    def timeline(self) -> list[dict[str, Any]]:
        return self.shown.estimate.timeline

    @property
    def why_not_faster(self) -> str | None:
        """Return why the next faster policy was not taken; None if the fastest of all fits."""
        faster = [c for c in self.candidates if not c.fits and (not self.best or _seconds(c) < _seconds(self.best))]
        if not faster:
            return None
        nearest = min(faster, key=lambda candidate: candidate.device_bytes)
        return f"{nearest.policy} would take {_seconds(nearest):.3g} s, but {nearest.limit}"

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
        lines = [f"{self.summary.name} ({self.summary.model_class}), {self.job.size}, {self.where}:"]
        lines += [
            f"  {'fits' if c.fits else 'no  '}  {format_bytes(c.device_bytes):>10}  {_seconds(c):8.3g} s  {c.policy}"
            for c in self.candidates
        ]
        lines.append(f"  best: {self.best.policy}" if self.best else f"  nothing fits: {self.least.limit}")
        return "\n".join(lines)


def _seconds(candidate: Candidate) -> float:
    return candidate.estimate.seconds


def judge(estimate: Estimate, budget: int, host_budget: int, margins: Margins) -> Candidate:
    """Hold a policy's figures against the budgets."""
    needed = estimate.needed_bytes + margins.total
    fits_host = estimate.host_bytes <= host_budget
    owner, size = max(estimate.owners.items(), key=lambda pair: pair[1])
    where = f"the {estimate.phase} of {estimate.region}" if estimate.region else f"the {estimate.phase}"
    holder = f"{KINDS.get(owner, owner)} hold {format_bytes(size)} in {where}"
    if needed > budget:
        limit = f"needs {format_bytes(needed)}, {format_bytes(needed - budget)} too much: {holder}"
    elif not fits_host:
        limit = f"needs {format_bytes(estimate.host_bytes)} of host memory, and there are {format_bytes(host_budget)}"
    else:
        limit = holder
    return Candidate(estimate=estimate, device_bytes=needed, fits=needed <= budget and fits_host, limit=limit)
