"""Shows the records of a survey: as text, as JSON, or as an HTML page that lists failing models first.

The HTML page has one table for each engine that was judged. A row is a model in a mode, a column a check; what failed
stands under its model, with the evidence and the command that repeats it. A check that fails for most models is named
above the table, and puts no model first. There is no chart, so the only script is the filter.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.auditing import report as strict_json
from lowtide.auditing.grades import Grade
from lowtide.auditing.report import SIGNS
from lowtide.auditing.result import RUNS, Verdict
from lowtide.html import render
from lowtide_zoo.records import fails_everywhere, summarize

if TYPE_CHECKING:
    from lowtide_zoo.records import Pass, Record

_TEMPLATE = Path(__file__).parent / "templates" / "zoo.html"

_UNCONFIRMED = "unconfirmed"
"""Takes the place of a verdict: the check failed, but not again with other weights and another batch."""

_LAST = ("audited", "no checkpointing", "refused", "not built")
"""The statuses, in this order, that come after the models that fail and those that could not be judged."""


def as_text(records: list[Record]) -> str:
    """Format the summary of one engine's records for a terminal."""
    summary = summarize(records)
    types = len({record.model_type for record in records})
    more = f", {summary.total} classes and variants" if summary.total > types else ""
    lines = [f"{types} model types{more}, engine {summary.engine}"]
    lines += [f"  {count:>4} {status}" for status, count in summary.by_status.items()]
    if summary.by_grade:
        lines.append("architectures by the worst grade of their failures:")
        lines += [f"  {count:>4} {grade}" for grade, count in summary.by_grade.items()]
    if summary.by_check:
        lines.append("failed checks, with the number of architectures:")
        lines += [f"  {count:>4} {check}" for check, count in summary.by_check.items()]
    if summary.failing:
        lines.append("by architecture" + (", without what fails everywhere:" if summary.everywhere else ":"))
        lines += [f"  {name}: {', '.join(checks)}" for name, checks in sorted(summary.failing.items())]
    return "\n".join(lines)


def as_json(records: list[Record], last_pass: Pass | None = None) -> str:
    """Format everything: the summary, with how long the survey took, then the records."""
    data: dict[str, Any] = dataclasses.asdict(summarize(records))
    if last_pass is not None:
        data["pass"] = dataclasses.asdict(last_pass)
    ordered = sorted(records, key=lambda record: record.subject)
    return strict_json.as_json({"summary": data, "records": [dataclasses.asdict(record) for record in ordered]})


def as_html(records: list[Record]) -> str:
    """Render the page. This needs the `html` extra."""
    engines: dict[str, list[Record]] = {}
    for record in records:
        engines.setdefault(record.engine, []).append(record)
    tables = [_table(engine, found) for engine, found in engines.items()]
    return render(_TEMPLATE, tables=tables, signs=SIGNS | {_UNCONFIRMED: "FAIL?"} | dict.fromkeys(Grade, "FAIL"))


def _table(engine: str, records: list[Record]) -> dict[str, Any]:
    checks = _checks(records)
    everywhere = fails_everywhere(records)
    rows = [_row(record, everywhere, with_runs=RUNS in checks) for record in records]
    return {
        "engine": engine,
        "checks": checks,
        "rows": sorted(rows, key=_sort_key),
        "statuses": _statuses(rows),
        "everywhere": sorted(f"{check} [{mode}]" for mode, check in everywhere),
        "counts": [_count(check, rows) for check in checks],
    }


def _checks(records: list[Record]) -> list[str]:
    """List the columns in the order in which audits run the checks; whether a set-up runs at all comes first."""
    found = dict.fromkeys(check for record in records for checks in record.verdicts.values() for check in checks)
    return sorted(found, key=lambda check: check != RUNS)


def _row(record: Record, everywhere: set[tuple[str, str]], *, with_runs: bool) -> dict[str, Any]:
    """Return a record with its `own` failures, and with what an audit leaves unsaid: that a set-up runs."""
    verdicts = {
        mode: ({RUNS: str(Verdict.PASS)} if with_runs else {}) | checks for mode, checks in record.verdicts.items()
    }
    for failure in record.failures:
        verdicts[failure["mode"]] |= {failure["name"]: failure["grade"]}
    for failure in record.unconfirmed:
        verdicts[failure["mode"]] |= {failure["name"]: _UNCONFIRMED}
    grades = list(Grade)
    own = [failure for failure in record.failures if (failure["mode"], failure["name"]) not in everywhere]
    worst = max((grades.index(Grade(failure["grade"])) for failure in own), default=-1)
    return vars(record) | {"name": record.subject.name, "verdicts": verdicts, "own": own, "worst": worst}


def _sort_key(row: dict[str, Any]) -> tuple[int, int, str]:
    status = row["status"]
    return -row["worst"], _LAST.index(status) if status in _LAST else -1, row["model_type"]


def _statuses(rows: list[dict[str, Any]]) -> dict[str, int]:
    return dict(collections.Counter(map(_status, sorted(rows, key=_sort_key))))


def _status(row: dict[str, Any]) -> str:
    if row["own"]:
        return f"with failures of their own, {list(Grade)[row['worst']]} at worst"
    return "without any of their own" if row["status"] == "audited" else str(row["status"])


def _count(check: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count a check's verdicts over all modes, and the models that fail it."""
    found = collections.Counter(checks[check] for row in rows for checks in row["verdicts"].values() if check in checks)
    return {
        "check": check,
        "verdicts": {
            "pass": found["pass"],
            "fail": sum(found[grade] for grade in Grade),
            **{kind: found[kind] for kind in (_UNCONFIRMED, "inconclusive", "not applicable")},
        },
        "models": sum(any(failure["name"] == check for failure in row["failures"]) for row in rows),
    }
