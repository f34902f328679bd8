"""A survey in figures: how many architectures, which checks fail where.

The audits of many models as one page: which model, in which mode, passes what; failing ones first.

One table for each engine that was judged. A row is a model in a mode, a column a check; what failed stands under its
model with the evidence and the command that repeats it. A check that fails for most models is a fact of the library: it
is named above the table, and puts no model first. No chart, so no script but the filter.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.auditing import report as strict_json
from lowtide.auditing.report import RUNS, SIGNS, Verdict
from lowtide.html import render

if TYPE_CHECKING:
    from lowtide_zoo.records import Record

_MOST = 0.5
"""Of the models that were audited, whether or not a check applies to them: what fails for the few that it applies to is
no fact of the library. And it must be two at least."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts over all records of one engine."""

    engine: str
    total: int
    by_status: dict[str, int]
    by_check: dict[str, int]
    """Architectures that fail, by "mode: check"."""
    everywhere: list[str]
    """Checks that fail for most models: facts of the library."""
    failing: dict[str, list[str]]
    """By architecture: the checks that it fails, without those that fail everywhere."""


def summarize(records: list[Record]) -> Summary:
    audited = [record for record in records if record.status == "audited"]
    counts: collections.Counter[str] = collections.Counter()
    for record in audited:
        counts.update(f"{failure['mode']}: {failure['name']}" for failure in record.failures)
    everywhere = {f"{mode}: {check}" for mode, check in fails_everywhere(audited)}
    failing = {
        record.model_type: names
        for record in audited
        if (names := [name for name in _names(record) if name not in everywhere])
    }
    return Summary(
        engine=records[0].engine if records else "",
        total=len(records),
        by_status=dict(collections.Counter(record.status for record in records).most_common()),
        by_check=dict(counts.most_common()),
        everywhere=sorted(everywhere),
        failing=failing,
    )


def fails_everywhere(records: list[Record]) -> set[tuple[str, str]]:
    """The checks, by mode, that fail for half of the models or more."""
    failed = collections.Counter((f["mode"], f["name"]) for record in records for f in record.failures)
    audited = collections.Counter((mode, c) for r in records for mode, checks in r.verdicts.items() for c in checks)
    return {key for key, count in failed.items() if count >= max(2, _MOST * audited[key]) and key[1] != RUNS}


def _names(record: Record) -> list[str]:
    return [f"{failure['mode']}: {failure['name']}" for failure in record.failures]


def as_text(records: list[Record]) -> str:
    summary = summarize(records)
    lines = [f"{summary.total} model types, engine {summary.engine}"]
    lines += [f"  {count:>4} {status}" for status, count in summary.by_status.items()]
    if summary.by_check:
        lines.append("failed checks, in so many architectures:")
        lines += [f"  {count:>4} {check}" for check, count in summary.by_check.items()]
    if summary.failing:
        lines.append("by architecture" + (", without what fails everywhere:" if summary.everywhere else ":"))
        lines += [f"  {name}: {', '.join(checks)}" for name, checks in sorted(summary.failing.items())]
    return "\n".join(lines)


def as_json(records: list[Record]) -> str:
    """Everything: the summary, then the records."""
    data: dict[str, Any] = dataclasses.asdict(summarize(records))
    ordered = sorted(records, key=lambda record: record.model_type)
    return strict_json.as_json({"summary": data, "records": [dataclasses.asdict(record) for record in ordered]})


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
