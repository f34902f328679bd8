"""The audits of many models as one page: which model, in which mode, passes what; failing ones first.

One table for each engine that was judged. A row is a model in a mode, a column a check; what failed stands under its
model with the evidence, and every model has the command that repeats its audit. No chart, so no script but the filter.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from lowtide.auditing.formats.text import SIGNS
from lowtide.auditing.verdicts import Verdict
from lowtide.errors import InvalidValueError
from lowtide.report_page import render

_TEMPLATE = Path(__file__).parent / "templates" / "zoo.html"
_KEYS = ("model_type", "model_class", "status", "why", "seconds", "engine", "failures", "verdicts", "command")
_STATUSES = ("failed to run", "timed out", "audited", "not built")
"""In the order of the table, after those with failures."""
_RUNS = "runs"

Record = dict[str, Any]


def as_zoo_html(records: list[Record]) -> str:
    """Needs the `html` extra; plotly is not used."""
    for record in records:
        _check(record)
    engines: dict[str, list[Record]] = {}
    for record in records:
        engines.setdefault(record["engine"], []).append(record)
    return render(_TEMPLATE, tables=[_table(engine, found) for engine, found in engines.items()], signs=SIGNS)


def _check(record: Record) -> None:
    missing = [key for key in _KEYS if key not in record]
    if missing:
        raise InvalidValueError(f"the zoo's record of {record.get('model_type')!r} lacks {', '.join(missing)}")
    if record["status"] not in _STATUSES:
        raise InvalidValueError(
            f"the zoo's record of {record['model_type']!r} has the unknown status {record['status']!r}: "
            f"expected one of {', '.join(_STATUSES)}"
        )


def _table(engine: str, records: list[Record]) -> dict[str, Any]:
    checks = _checks(records)
    if _RUNS in checks:
        records = [record | {"verdicts": _with_runs(record["verdicts"])} for record in records]
    return {
        "engine": engine,
        "checks": checks,
        "records": sorted(records, key=_place),
        "statuses": _statuses(records),
        "counts": _counts(records, checks),
    }


def _checks(records: list[Record]) -> list[str]:
    """Columns, in the order in which the audits ran them; whether a set-up runs at all is the first question."""
    found = dict.fromkeys(check for record in records for checks in record["verdicts"].values() for check in checks)
    return sorted(found, key=lambda check: check != _RUNS)


def _with_runs(verdicts: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """An audit mentions that a set-up runs only if it does not."""
    return {mode: {_RUNS: str(Verdict.PASS)} | found for mode, found in verdicts.items()}


def _place(record: Record) -> tuple[bool, int, str]:
    return not record["failures"], _STATUSES.index(record["status"]), record["model_type"]


def _statuses(records: list[Record]) -> dict[str, int]:
    counts = collections.Counter(record["status"] for record in records)
    failing = sum(bool(record["failures"]) for record in records)
    found = {"with failures": failing, "without": counts["audited"] - failing}
    return found | {status: counts[status] for status in _STATUSES if status != "audited" and counts[status]}


def _counts(records: list[Record], checks: list[str]) -> list[dict[str, Any]]:
    """By check: models by verdict, over all modes; and failures that a second run confirmed."""
    return [
        {
            "check": check,
            "verdicts": {
                str(verdict): sum(found.get(check) == verdict for r in records for found in r["verdicts"].values())
                for verdict in Verdict
            },
            "models": sum(any(failure["check"] == check for failure in r["failures"]) for r in records),
            "confirmed": sum(
                any(failure["check"] == check and failure["confirmed"] for failure in r["failures"]) for r in records
            ),
        }
        for check in checks
    ]
