"""The audits of many models as one page: which model, in which mode, passes what; failing ones first.

One table for each engine that was judged. A row is a model in a mode, a column a check; what failed stands under its
model with the evidence, and every model has the command that repeats its audit. A check that fails for more than half
of the models is a fact of the library: it is named above the table, and puts no model first. No chart, so no script but
the filter.
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
_KEYS = {"model_type", "model_class", "status", "why", "engine", "failures", "unconfirmed", "verdicts", "command"}
_RUNS = "runs"
_UNCONFIRMED = "unconfirmed"
"""In the place of a verdict: failed, and did not fail again with other weights and another batch."""
_EVERYWHERE = 0.5
_LAST = ("audited", "no checkpointing", "refused", "not built")
"""In this order after the models that fail, and after those that could not be judged."""

Record = dict[str, Any]


def as_zoo_html(records: list[Record]) -> str:
    """Of a survey's records, as dicts. Needs the `html` extra; plotly is not used."""
    engines: dict[str, list[Record]] = {}
    for record in records:
        missing = sorted(_KEYS - record.keys())
        if missing:
            raise InvalidValueError(f"the zoo's record of {record.get('model_type')!r} lacks {', '.join(missing)}")
        engines.setdefault(record["engine"], []).append(record)
    tables = [_table(engine, found) for engine, found in engines.items()]
    return render(_TEMPLATE, tables=tables, signs=SIGNS | {_UNCONFIRMED: "FAIL?"})


def _table(engine: str, records: list[Record]) -> dict[str, Any]:
    checks = _checks(records)
    everywhere = fails_everywhere(records)
    rows = [_row(record, everywhere, with_runs=_RUNS in checks) for record in records]
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
    found = dict.fromkeys(check for record in records for checks in record["verdicts"].values() for check in checks)
    return sorted(found, key=lambda check: check != _RUNS)


def fails_everywhere(records: list[Record]) -> set[tuple[str, str]]:
    """The checks, by mode, that fail for most models."""
    failed = collections.Counter((f["mode"], f["name"]) for record in records for f in record["failures"])
    judged = collections.Counter((mode, c) for r in records for mode, checks in r["verdicts"].items() for c in checks)
    return {key for key, count in failed.items() if count >= max(2, _EVERYWHERE * judged[key]) and key[1] != _RUNS}


def _row(record: Record, everywhere: set[tuple[str, str]], *, with_runs: bool) -> dict[str, Any]:
    """A record with `own` failures, and with what an audit leaves unsaid: that a set-up runs."""
    verdicts = {
        mode: ({_RUNS: str(Verdict.PASS)} if with_runs else {}) | checks for mode, checks in record["verdicts"].items()
    }
    for failure in record["unconfirmed"]:
        verdicts[failure["mode"]] |= {failure["name"]: _UNCONFIRMED}
    own = [failure for failure in record["failures"] if (failure["mode"], failure["name"]) not in everywhere]
    return record | {"verdicts": verdicts, "own": own}


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
