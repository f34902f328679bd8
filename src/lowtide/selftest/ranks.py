"""The stage `ranks`: are gradients right on several devices, under DDP and FSDP2?

The ranks are started by torchrun, one for each device, and run `lowtide.selftest.rank`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lowtide.auditing.result import Verdict
from lowtide.selftest.child import output_of
from lowtide.selftest.record import Row, StageResult, without_paths

if TYPE_CHECKING:
    from lowtide.selftest.bench import Bench

_TIMEOUT = 900


def run(bench: Bench) -> StageResult:
    """Start the ranks, and return what the first of them reports."""
    if bench.ranks == 1:
        return StageResult(name="ranks", why="this is one process: `--ranks 2` tests DDP and FSDP2")
    bench.show(f"{bench.ranks} ranks")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(bench.ranks)]
    found = json.loads(output_of([*launch, "-m", "lowtide.selftest.rank", bench.device.type], timeout=_TIMEOUT))
    return StageResult(name="ranks", rows=[_row(row) for row in found])


def _row(found: dict[str, str]) -> Row:
    return Row(name=found["name"], verdict=Verdict(found["verdict"]), summary=without_paths(found["summary"]))
