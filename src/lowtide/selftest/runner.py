"""Runs the stages one after the other, and keeps those that are finished, so that a self-test can be resumed.

Each stage has a share of the time, and what earlier stages left of theirs. If the device is lost, the stage that lost
it says so, and none runs after it: in the same process, all of them would fail for that reason.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import gc
import importlib.util
import time
from typing import TYPE_CHECKING

import torch

from lowtide.auditing.grades import Grade, grade_named
from lowtide.auditing.result import Verdict
from lowtide.errors import InvalidValueError, MissingDependencyError
from lowtide.selftest import frees, overlaps, peers, plans, ranks, right
from lowtide.selftest.bench import find_device, give_back, open_bench
from lowtide.selftest.environment import describe
from lowtide.selftest.record import STAGE_NAMES, Record, Row, StageResult, without_paths
from lowtide.selftest.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.progress import Show
    from lowtide.selftest.bench import Bench

STAGES: dict[str, Callable[[Bench], StageResult]] = dict(
    zip(STAGE_NAMES, (right.run, frees.run, overlaps.run, plans.run, peers.run, ranks.run), strict=True)
)
"""All stages by name, in the order in which they run."""

_SHARES = {"right": 0.45, "frees": 0.08, "overlaps": 0.12, "plans": 0.15, "peers": 0.1, "ranks": 0.1}
"""Each stage's share of the time."""

_NEEDED = ("transformers", "peft")


def run(
    device: str | None = None,
    *,
    quick: bool = False,
    ranks: int = 1,
    fail_on: Grade | str = Grade.UNSAFE,
    earlier: Record | None = None,
    keep: Callable[[Record], None] = lambda _: None,
    show: Show = lambda *_: None,
) -> Record:
    """Test a device, and return the record. `keep` is given the record so far after each stage.

    `earlier` is a record of an interrupted self-test, whose stages are not run again. Failures count from the grade
    `fail_on` on.
    """
    threshold = grade_named(fail_on)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"the self-test needs {', '.join(missing)}: pip install 'lowtide[hf]'")
    _check_ranks(device, ranks)
    now = ""

    def tell(what: str) -> None:
        show(f"{now}: {what}", list(STAGES).index(now), len(STAGES))

    with open_bench(device, quick=quick, ranks=ranks, show=tell) as bench:
        record = Record(
            quick=quick, date=_today(), environment=describe(bench), stages=[], ranks=ranks, fail_on=threshold
        )
        done = {} if earlier is None else _stages_of(earlier, record)
        began, share = time.monotonic(), 0.0
        for now, stage in STAGES.items():
            share += _SHARES[now]
            bench.limits.deadline = began + share * THRESHOLDS.seconds
            result = done[now] if now in done else _run_stage(now, stage, bench)
            record = dataclasses.replace(record, stages=[*record.stages, result], date=_today())
            keep(record)
            if bench.limits.lost:
                break
    return record


def _check_ranks(device: str | None, ranks: int) -> None:
    if ranks < 1:
        raise InvalidValueError(f"ranks must be 1 or more, got {ranks}")
    kind = find_device(device).type
    if ranks > 1 and kind == "mps":
        raise InvalidValueError("torch has no collectives for mps: leave --ranks out")
    if kind not in ("cpu", "sim") and ranks > torch.accelerator.device_count():
        raise InvalidValueError(
            f"{ranks} ranks need {ranks} devices, and this machine has {torch.accelerator.device_count()}"
        )


def _stages_of(earlier: Record, now: Record) -> dict[str, StageResult]:
    """Return the finished stages of an earlier record, if it was made in the same way on the same machine."""
    fields = [name for name in ("quick", "thresholds") if getattr(earlier, name) != getattr(now, name)]
    known = {**earlier.environment, **now.environment}.keys() - {"load"}
    fields += [name for name in sorted(known) if earlier.environment.get(name) != now.environment.get(name)]
    if fields:
        raise InvalidValueError(
            f"the record to resume has a different {', '.join(fields)}: run the self-test anew, without --resume"
        )
    return {stage.name: stage for stage in earlier.stages if stage.name != "ranks" or earlier.ranks == now.ranks}


def _run_stage(name: str, stage: Callable[[Bench], StageResult], bench: Bench) -> StageResult:
    """Run a stage. If it raises, that is a failure, unless the device has too little memory for it."""
    began = time.perf_counter()
    try:
        result = stage(bench)
    except torch.OutOfMemoryError as error:
        result = _not_run(name, Verdict.INCONCLUSIVE, "the device has too little free memory for it", error)
    except Exception as error:  # noqa: BLE001  (whatever the engine raises is the finding)
        result = _not_run(name, Verdict.FAIL, f"it raises {type(error).__name__}", error)
    gc.collect()
    bench.limits.lost = bench.limits.lost or give_back(bench.device)
    if bench.limits.lost:
        said = (
            f"the device no longer answers: {without_paths(bench.limits.lost)}. The stages after this one did not run"
        )
        lost = Row(name="the device", verdict=Verdict.FAIL, summary=f"{said}: --resume runs them in a new process")
        result = dataclasses.replace(result, rows=[*result.rows, lost])
    return dataclasses.replace(result, seconds=round(time.perf_counter() - began, 1))


def _not_run(name: str, verdict: Verdict, why: str, error: Exception) -> StageResult:
    row = Row(name="runs", verdict=verdict, summary=f"{why}: {without_paths(str(error))}")
    return StageResult(name=name, rows=[row], why=why)


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()
