"""The stage `ranks`: are gradients right on several devices, under DDP and FSDP2?

The ranks are started by torchrun, one for each device, and run `lowtide.selftest.rank`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lowtide.auditing.result import Verdict
from lowtide.errors import LowtideError
from lowtide.selftest.child import output_of
from lowtide.selftest.findings import Findings
from lowtide.selftest.record import Row, StageResult, without_paths

if TYPE_CHECKING:
    from lowtide.selftest.bench import Bench

RANK = "lowtide.selftest.rank"
"""The module that each rank runs."""
_TIMEOUT = 180
"""Seconds for all ranks, if the stage has that many left."""


def run(bench: Bench) -> StageResult:
    """Start the ranks, and return what the first of them reports."""
    if bench.ranks == 1:
        return StageResult(name="ranks", why="this is one process: `--ranks 2` tests DDP and FSDP2")
    bench.show(f"{bench.ranks} ranks")
    found = Findings(bench=bench)
    rows: list[dict[str, Any]] = found.attempt(f"{bench.ranks} ranks", _ask, bench, found) or []
    found.rows += [_row(row) for row in rows]
    return found.stage("ranks")


def _ask(bench: Bench, found: Findings) -> list[dict[str, Any]]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(bench.ranks), "-m", RANK]
    timeout = min(_TIMEOUT, bench.limits.seconds_left)
    try:
        rows: list[dict[str, Any]] = json.loads(
            output_of([*launch, bench.device.type], timeout=timeout, folder=bench.folder)
        )
    except LowtideError:
        if not bench.limits.reached:  # ranks that wait for each other are a failure, and a slow machine is not
            raise
        found.leave_out(f"{bench.ranks} ranks", bench.limits.reached)
        return []
    return rows


def _row(found: dict[str, str]) -> Row:
    return Row(name=found["name"], verdict=Verdict(found["verdict"]), summary=without_paths(found["summary"]))
