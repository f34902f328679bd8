"""The audits of many models as one page: which model, in which mode, passes what; failing ones first.

One table for each engine that was judged. A row is a model in a mode, a column a check; what failed stands under its
model with the evidence and the command that repeats it. A check that fails for most models is a fact of the library: it
is named above the table, and puts no model first. No chart, so no script but the filter.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.auditing.formats.text import SIGNS
from lowtide.auditing.verdicts import RUNS, Verdict
from lowtide.report_page import render
from lowtide.survey.summary import fails_everywhere

if TYPE_CHECKING:
    from lowtide.survey.records import Record

_TEMPLATE = Path(__file__).parent / "templates" / "zoo.html"
_UNCONFIRMED = "unconfirmed"
"""In the place of a verdict: failed, and did not fail again with other weights and another batch."""
_LAST = ("audited", "no checkpointing", "refused", "not built")
"""In this order after the models that fail, and after those that could not be judged."""


def as_html(records: list[Record]) -> str:
    """Needs the `html` extra; plotly is not used."""
    engines: dict[str, list[Record]] = {}
    for record in records:
        engines.setdefault(record.engine, []).append(record)
    tables = [_table(engine, found) for engine, found in engines.items()]
    return render(_TEMPLATE, tables=tables, signs=SIGNS | {_UNCONFIRMED: "FAIL?"})


def _table(engine: str, records: list[Record]) -> dict[str, Any]:
    checks = _checks(records)
    everywhere = fails_everywhere(records)
    rows = [_row(record, everywhere, with_runs=RUNS in checks) for record in records]
    return {
        "engine": engine,
        "checks": checks,
        "rows": sorted(rows, key=_place),
        "statuses": _statuses(rows),
        "everywhere": sorted(f"{check} [{mode}]" for mode, check in everywhere),
        "counts": [_count(check, rows) for check in checks],
    }


def _checks(records: list[Record]) -> list[str]:
    """Columns, in the order in which the audits ran them; whether a set-up runs at all is the first question."""
    found = dict.fromkeys(check for record in records for checks in record.verdicts.values() for check in checks)
    return sorted(found, key=lambda check: check != RUNS)


def _row(record: Record, everywhere: set[tuple[str, str]], *, with_runs: bool) -> dict[str, Any]:
    """A record with `own` failures, and with what an audit leaves unsaid: that a set-up runs."""
    verdicts = {
        mode: ({RUNS: str(Verdict.PASS)} if with_runs else {}) | checks for mode, checks in record.verdicts.items()
    }
    for failure in record.unconfirmed:
        verdicts[failure["mode"]] |= {failure["name"]: _UNCONFIRMED}
    own = [failure for failure in record.failures if (failure["mode"], failure["name"]) not in everywhere]
    return vars(record) | {"verdicts": verdicts, "own": own}


def _place(row: dict[str, Any]) -> tuple[bool, int, str]:
    status = row["status"]
    return not row["own"], _LAST.index(status) if status in _LAST else -1, row["model_type"]


def _statuses(rows: list[dict[str, Any]]) -> dict[str, int]:
    return dict(collections.Counter(map(_status, sorted(rows, key=_place))))


def _status(row: dict[str, Any]) -> str:
    if row["own"]:
        return "with failures of their own"
    return "without any of their own" if row["status"] == "audited" else str(row["status"])


def _count(check: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often a check had which verdict, over all modes; and the models that fail it."""
    found = collections.Counter(checks[check] for row in rows for checks in row["verdicts"].values() if check in checks)
    return {
        "check": check,
        "verdicts": {kind: found[kind] for kind in ("pass", "fail", _UNCONFIRMED, "inconclusive", "not applicable")},
        "models": sum(any(failure["name"] == check for failure in row["failures"]) for row in rows),
    }
