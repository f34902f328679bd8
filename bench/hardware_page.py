"""Write docs/hardware.md from the records in docs/hardware: `python bench/hardware_page.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.selftest import read_record
from lowtide.selftest.report import QUESTIONS, word_for

if TYPE_CHECKING:
    from lowtide.selftest import Record, Row

DOCS = Path(__file__).parent.parent / "docs"

INTRODUCTION = """\
# Devices that Lowtide was tested on

Each row is the record of one [`lowtide selftest`](selftest.md), on one device with one set of versions. Everything in a
record was measured in that run; [a schema](hardware/schema.json) says what is in it. `bench/hardware_page.py` writes
this page from the records in `docs/hardware`.
"""

NO_GPU = """
**There is no record of a GPU yet.** The emulated device proves order, bytes and waits, not a GPU's kernels, and its
times are those of a virtual clock. A record of the CPU proves gradients and bytes; its times say how busy that machine
was. If you have a GPU, yours can be the first.
"""

CONTRIBUTE = """
## Send yours

1. `lowtide selftest -o record.json` on your machine (`--ranks 2` with two devices or more). It takes under ten minutes.
2. Read it: it has versions, device and driver, and no host name, user or path.
3. Paste it into the issue form "A record of a device".
"""


def main() -> None:
    (DOCS / "hardware.md").write_text(from_records())


def records() -> dict[str, Record]:
    """Return the records by file name."""
    return {
        path.name: read_record(path) for path in sorted((DOCS / "hardware").glob("*.json")) if path.stem != "schema"
    }


def from_records() -> str:
    found = records()
    kinds = {record.environment["device"]["type"] for record in found.values()}
    note = "" if kinds - {"sim", "cpu"} else NO_GPU
    return f"{INTRODUCTION}{note}\n{_summary(found)}\n\n{_figures(found)}\n{CONTRIBUTE}"


def _summary(found: dict[str, Record]) -> str:
    lines = [
        "| device | torch | lowtide | date | " + " | ".join(QUESTIONS) + " | record |",
        "|---" * (5 + len(QUESTIONS)) + "|",
    ]
    for name, record in found.items():
        device, packages = record.environment["device"], record.environment["packages"]
        cells = [
            f"{device['name']} ({device['type']})",
            packages["torch"],
            record.environment["lowtide"],
            record.date,
            *(word_for(record[stage]) for stage in QUESTIONS),
            f"[{'quick' if record.quick else 'full'}](hardware/{name})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figures(found: dict[str, Record]) -> str:
    headings = (
        "device",
        "gradients bit-identical",
        "within rounding",
        "freed by recompute+offload",
        "copies hidden",
        "worst planned peak",
        "worst planned step, before and after calibration",
    )
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for record in found.values():
        cells = [
            record.environment["device"]["name"],
            *_gradients(record),
            _freed(record),
            _hidden(record),
            _plan(record),
            _planned_seconds(record),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gradients(record: Record) -> tuple[str, str]:
    rows = [row for row in record["right"].rows if "identical" in row.figures]
    identical = sum(row.figures["identical"] for row in rows)
    rest = [row for row in rows if not row.figures["identical"] and row.verdict == "pass"]
    tiles = sum("tile" in row.name for row in rest)
    own = len(rest) - tiles
    counts = [f"{tiles} (tiles)" if tiles or not own else "", f"{own} (the plain model's own noise)" if own else ""]
    return f"{identical} of {len(rows)}", ", ".join(filter(None, counts))


def _freed(record: Record) -> str:
    rows = {row.name: row.figures for row in record["frees"].rows}
    if "recompute+offload" not in rows:
        return ""
    left, plain = (rows[name]["after_forward_bytes"] for name in ("recompute+offload", "none"))
    return f"{1 - left / plain:.0%} after forward"


def _hidden(record: Record) -> str:
    row = _row(record, "overlaps", "copies hidden")
    return "" if row is None else f"{row.figures['share']:.0%}"


def _plan(record: Record) -> str:
    errors = [row.figures["peak_error"] for row in record["plans"].rows if "peak_error" in row.figures]
    return f"{max(errors, key=abs):+.2%}" if errors else ""


def _planned_seconds(record: Record) -> str:
    """Return the worst errors of planned seconds; before calibration only where there is a data sheet to plan from."""
    rows = [row.figures for row in record["plans"].rows if row.figures.get("seconds")]
    names = ("planned_seconds_before_calibration", "planned_seconds")
    errors = [[row[name] / row["seconds"] - 1 for row in rows if row.get(name)] for name in names]
    return ", ".join(f"{max(found, key=abs):+.0%}" if found else "no data sheet" for found in errors) if rows else ""


def _row(record: Record, stage: str, name: str) -> Row | None:
    return next((row for row in record[stage].rows if row.name == name), None)


if __name__ == "__main__":
    main()
