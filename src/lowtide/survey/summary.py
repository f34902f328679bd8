"""A survey in figures: how many architectures, which checks fail where."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from lowtide.auditing.formats import strict_json
from lowtide.auditing.verdicts import RUNS

if TYPE_CHECKING:
    from lowtide.survey.records import Record

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
