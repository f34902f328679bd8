"""Show reports that users sent as rows of docs/plan-measured.md. Run `python -m bench.measured.reports FILE ...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.measured.compare import row
from bench.measured.runs import Run

GIB = 2**30
KINDS = {"single": "one GPU", "fsdp2": "FSDP2", "ddp": "DDP", "zero3": "ZeRO-3"}


def rows_of(report: dict[str, Any]) -> list[str]:
    """Return a row for each figure that a report has measured."""
    settings, measured = report["settings"], report["measured"]
    engine = settings.get("engine", "single")
    size = f"{settings.get('batch_size', 1)} x {settings['tokens']} tokens" if "tokens" in settings else "its own batch"
    planned = {kind: report["planned"][f"{kind}_bytes"] for kind in ("allocated", "reserved")}
    found = []
    for kind in planned:
        if measured[f"{kind}_bytes"] is None:
            continue
        run = Run(
            number=0,
            what=f"{report['model']}, {size}, {report['policy']}",
            source=measured["source"] or "",
            gib=measured[f"{kind}_bytes"] / GIB,
            measured=kind,
            kind=KINDS.get(engine, engine),
        )
        found.append(row(run, planned))
    return found


def main() -> None:
    for name in sys.argv[1:]:
        for line in rows_of(json.loads(Path(name).read_text())):
            print(line)


if __name__ == "__main__":
    main()
