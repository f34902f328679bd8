"""Finds what would fit where nothing does: adapters, fewer bits, sharded weights, fewer tokens, a larger device.

Each change is tried alone, from the one that changes a training run least, under the policy that needs the least
memory; adapters on a 4-bit base are tried together. More memory, of this device or of a larger one, needs no simulation
of its own: the bytes stay the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError
from lowtide.hardware.accelerators import load_table, margins_for
from lowtide.planning.result import WayOut, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.planning.result import Candidate
    from lowtide.simulation.cache import CachedSimulator
    from lowtide.simulation.estimate import Estimate
    from lowtide.targets.job import Job

_LORA = 16
_RANKS = (2, 4, 8)
_STEP = 1024
"""To how many tokens a shorter sequence is rounded."""
_GIB = 2**30


def find_ways_out(question: Question, report: Callable[[str], None]) -> tuple[list[WayOut], str | None]:
    """Return the changes that would make the step fit; if there are none, a sentence about what was tried."""
    found: list[WayOut] = []
    tried = []
    for change in _changes(question.job, can_adapt=question.simulator.builds_model):
        if any(way.change.keys() <= change.keys() for way in found):
            continue  # a smaller change of the same kind is enough
        tried.append(" with ".join(f"{name}={value}" for name, value in change.items()))
        report(f"trying {tried[-1]}")
        if (way := question.ask(change)) is not None:
            found.append(way)
    found += [*question.shorter(report), *question.more_memory(report)]
    tried += ["fewer tokens"] if question.job.tokens is not None else []
    return found, None if found else f"no change that was tried makes it fit: {', '.join([*tried, 'a larger device'])}"


def _changes(job: Job, *, can_adapt: bool) -> Iterator[dict[str, Any]]:
    """Yield what may be tried; a combination that a job refuses is no way out."""
    if job.batch_size > 1:
        yield {"batch_size": 1}
    if can_adapt and job.lora is None:
        if job.optimizer in ("adamw", "adamw_foreach"):
            yield {"optimizer": "adamw8bit"}
        yield {"lora": _LORA}
        yield {"lora": _LORA, "base": "4bit"}
    elif can_adapt and job.base == "plain":
        yield {"base": "4bit"}
    if not job.shards_weights:
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
    known: Estimate | None = None
    """The figures of this policy without a change, if it was simulated."""

    def ask(self, change: dict[str, Any]) -> WayOut | None:
        """Return the change with a policy that fits; None if none does, or if the change is not possible."""
        with contextlib.suppress(LowtideError):  # engines and models that do not go with the change
            found = self._judged(dataclasses.replace(self.job, **change))
            if found is not None and found.verdict == "fits":
                return WayOut(change=change, policy=found.policy, device_bytes=found.device_bytes)
        return None

    def shorter(self, report: Callable[[str], None]) -> Iterator[WayOut]:
        """Yield the longest sequence that fits, to 1024 tokens, by halving the distance."""
        tokens = self.job.tokens
        if tokens is None:
            return
        low, high, best = 0, -(-tokens // _STEP), None
        while high - low > 1:
            middle = (low + high) // 2
            report(f"trying {middle * _STEP} tokens")
            way = self.ask({"tokens": middle * _STEP})
            low, high, best = (middle, high, way) if way else (low, middle, best)
        if best is not None:
            yield best

    def more_memory(self, report: Callable[[str], None]) -> Iterator[WayOut]:
        """Yield a larger budget on the same device, or else the next larger device of the table that has room."""
        card = self.accelerator
        resident = self.simulator.summary.resident_bytes
        rows = sorted((row for row in load_table() if row.memory > card.memory), key=lambda row: row.memory)
        rows = [*([card] if self.budget < card.memory else []), *rows]
        rows = [row for row in rows if resident + self._margins(row) <= self._usable(row.memory)]
        if not rows:
            return  # no card has room for the weights: nothing is to be simulated
        report("looking for more memory")
        estimate = self.known or self.simulator.estimate(self.policy, exact=False)
        for row in rows:
            judged = judge(estimate, row.memory, self._host(row), margins_for(row, self.job.ranks), self.headroom)
            if judged.verdict == "fits":
                change = {"budget": self._larger_budget(judged)} if row is card else {"device": row.name}
                yield WayOut(change=change, policy=judged.policy, device_bytes=judged.device_bytes)
                return

    def _larger_budget(self, found: Candidate) -> str | None:
        """Return the least budget in whole GiB that leaves the headroom, too; None means all of the device."""
        least = math.ceil(found.device_bytes / self._usable(_GIB))
        return f"{least}GiB" if least * _GIB <= self.accelerator.memory else None

    def _usable(self, budget: int) -> float:
        return budget * (1 - self.headroom)

    def _margins(self, device: Accelerator, ranks: int | None = None) -> int:
        return margins_for(device, ranks or self.job.ranks).total

    def _host(self, device: Accelerator) -> int:
        """Return the host memory beside a device: what was asked for, or by default what a plan assumes for it."""
        _, usual = self.accelerator.budgets(None, None)
        return device.budgets(None, None)[1] if self.host_budget == usual else self.host_budget

    def _judged(self, job: Job) -> Candidate | None:
        """Judge the policy in another job; None if there is no room for the weights."""
        self.simulator.change_job(job)
        try:
            if self.simulator.summary.resident_bytes + self._margins(self.accelerator, job.ranks) > self.budget:
                return None
            estimate = self.simulator.estimate(self.policy, exact=False)
        finally:
            self.simulator.change_job(self.job)
        return judge(estimate, self.budget, self.host_budget, margins_for(self.accelerator, job.ranks), self.headroom)
