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
from lowtide.policy.rules import joined

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


def find_ways_out(
    simulator: CachedSimulator,
    job: Job,
    accelerator: Accelerator,
    budget: int,
    host_budget: int,
    headroom: float,
    report: Callable[[str], None],
) -> list[WayOut]:
    """Return the changes that would make the step fit, each with a policy that then fits."""
    question = _Question(simulator, job, accelerator, budget, host_budget, headroom)
    tile = simulator.summary.tile_options[-1]
    found: list[WayOut] = []
    for change in _changes(job, can_adapt=simulator.builds_model):
        if any(way.change.keys() <= change.keys() for way in found):
            continue  # a smaller change of the same kind is enough
        report(f"trying {', '.join(f'{name}={value}' for name, value in change.items())}")
        if (way := question.ask(change, tile)) is not None:
            found.append(way)
    return [*found, *question.shorter(tile, report), *question.larger_device(tile)]


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


class _Question:
    """The question that nothing fits, to be asked with changes."""

    def __init__(
        self,
        simulator: CachedSimulator,
        job: Job,
        accelerator: Accelerator,
        budget: int,
        host_budget: int,
        headroom: float,
    ) -> None:
        self._simulator = simulator
        self._job = job
        self._accelerator = accelerator
        self._budget, self._host_budget, self._headroom = budget, host_budget, headroom

    def ask(self, change: dict[str, Any], tile: str) -> WayOut | None:
        """Return the change with a policy that fits; None if none does, or if the change is not possible."""
        with contextlib.suppress(LowtideError):  # engines and models that do not go with the change
            found = self._leanest(dataclasses.replace(self._job, **change), tile)
            if found is not None and found.fits and not found.is_tight:
                return WayOut(change=change, policy=found.policy, device_bytes=found.device_bytes)
        return None

    def shorter(self, tile: str, report: Callable[[str], None]) -> Iterator[WayOut]:
        """Yield the longest sequence that fits, to 1024 tokens, by halving the distance."""
        tokens = self._job.tokens
        if tokens is None:
            return
        low, high, best = 0, tokens // _STEP, None
        while high - low > 1:
            middle = (low + high) // 2
            report(f"trying {middle * _STEP} tokens")
            way = self.ask({"tokens": middle * _STEP}, tile)
            low, high, best = (middle, high, way) if way else (low, middle, best)
        if best is not None:
            yield best

    def larger_device(self, tile: str) -> Iterator[WayOut]:
        """Yield the next larger device of the table on which the same step fits."""
        found = self._leanest(self._job, tile)
        if found is None:
            return
        larger = sorted((row for row in load_table() if row.memory > self._budget), key=lambda row: row.memory)
        for row in larger:
            judged = judge(
                found.estimate, row.memory, 2 * row.memory, margins_for(row, self._job.ranks), self._headroom
            )
            if judged.fits and not judged.is_tight:
                yield WayOut(change={"device": row.name}, policy=judged.policy, device_bytes=judged.device_bytes)
                return

    def _leanest(self, job: Job, tile: str) -> Candidate | None:
        self._simulator.change_job(job)
        margins = margins_for(self._accelerator, job.ranks)
        try:
            if self._simulator.summary.resident_bytes + margins.total > self._budget and job != self._job:
                return None
            estimate = self._simulator.estimate(joined("recompute+offload", tile), exact=False)
        finally:
            self._simulator.change_job(self._job)
        return judge(estimate, self._budget, self._host_budget, margins, self._headroom)
