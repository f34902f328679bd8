"""Finds what would fit where nothing does: adapters, fewer bits, sharded weights, fewer tokens, a larger device.

Each change is tried alone, from the one that changes a training run least, under the policy that needs the least
memory; adapters on a 4-bit base are tried together. A larger device needs no simulation: the bytes stay the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError
from lowtide.hardware.accelerators import load_table, margins_for
from lowtide.planning.result import WayOut, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.planning.result import Candidate
    from lowtide.simulation.cache import CachedSimulator
    from lowtide.targets.job import Job

_LORA = 16
_RANKS = (2, 4, 8)
_STEP = 1024
"""To how many tokens a shorter sequence is rounded."""


def find_ways_out(question: Question, report: Callable[[str], None]) -> list[WayOut]:
    """Return the changes that would make the step fit."""
    found: list[WayOut] = []
    for change in _changes(question.job, can_adapt=question.simulator.builds_model):
        if any(way.change.keys() <= change.keys() for way in found):
            continue  # a smaller change of the same kind is enough
        report(f"trying {', '.join(f'{name}={value}' for name, value in change.items())}")
        if (way := question.ask(change)) is not None:
            found.append(way)
    return [*found, *question.shorter(report), *question.larger_device()]


def _changes(job: Job, *, can_adapt: bool) -> Iterator[dict[str, Any]]:
    if job.batch_size > 1:
        yield {"batch_size": 1}
    if job.lora is None and can_adapt:
        if job.optimizer in ("adamw", "adamw_foreach"):
            yield {"optimizer": "adamw8bit"}
        yield {"lora": _LORA}
        if not job.shards_weights:
            yield {"lora": _LORA, "base": "4bit"}
    elif job.base == "plain" and can_adapt and not job.shards_weights:
        yield {"base": "4bit"}
    if job.base == "plain" and not job.shards_weights:
        for ranks in _RANKS if job.ranks == 1 else (job.ranks,):
            yield {"ranks": ranks, "engine": "fsdp2"}


@dataclasses.dataclass(frozen=True)
class Question:
    """The question that nothing fits, to be asked with changes, of one policy."""

    simulator: CachedSimulator
    job: Job
    accelerator: Accelerator
    policy: str
    budget: int
    host_budget: int
    headroom: float

    def ask(self, change: dict[str, Any]) -> WayOut | None:
        """Return the change with a policy that fits; None if none does, or if the change is not possible."""
        with contextlib.suppress(LowtideError):  # engines and models that do not go with the change
            found = self._judged(dataclasses.replace(self.job, **change))
            if found is not None and found.fits and not found.is_tight:
                return WayOut(change=change, policy=found.policy, device_bytes=found.device_bytes)
        return None

    def shorter(self, report: Callable[[str], None]) -> Iterator[WayOut]:
        """Yield the longest sequence that fits, to 1024 tokens, by halving the distance."""
        tokens = self.job.tokens
        if tokens is None:
            return
        low, high, best = 0, tokens // _STEP, None
        while high - low > 1:
            middle = (low + high) // 2
            report(f"trying {middle * _STEP} tokens")
            way = self.ask({"tokens": middle * _STEP})
            low, high, best = (middle, high, way) if way else (low, middle, best)
        if best is not None:
            yield best

    def larger_device(self) -> Iterator[WayOut]:
        """Yield the next larger device of the table on which the same step fits."""
        found = self._judged(self.job)
        if found is None:
            return
        larger = sorted((row for row in load_table() if row.memory > self.budget), key=lambda row: row.memory)
        for row in larger:
            judged = judge(found.estimate, row.memory, 2 * row.memory, margins_for(row, self.job.ranks), self.headroom)
            if judged.fits and not judged.is_tight:
                yield WayOut(change={"device": row.name}, policy=judged.policy, device_bytes=judged.device_bytes)
                return

    def _judged(self, job: Job) -> Candidate | None:
        self.simulator.change_job(job)
        margins = margins_for(self.accelerator, job.ranks)
        try:
            if self.simulator.summary.resident_bytes + margins.total > self.budget and job != self.job:
                return None
            estimate = self.simulator.estimate(self.policy, exact=False)
        finally:
            self.simulator.change_job(self.job)
        return judge(estimate, self.budget, self.host_budget, margins, self.headroom)
