"""Compares a report with an earlier one, so that only new failures count.

A baseline is the JSON of a report: `lowtide audit ... --format json -o known.json`. A failure is known if the baseline
has one of the same check in the same mode that is at least as bad: the grade is no worse, no more parameters are named,
and none that the baseline does not name. A failure that names nothing is known if the baseline's names nothing either,
and one that is an error if the baseline's is an error of the same type. Everything else about the two reports may
differ, such as sizes of errors and bytes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.auditing.report import AuditReport
from lowtide.errors import CannotAuditError

if TYPE_CHECKING:
    from lowtide.auditing.result import CheckResult

_NAMES = (
    "cut",
    "untried",
    "lost",
    "gained",
    "different",
    "experts",
    "hidden",
    "accumulations",
    "missed",
    "repeated",
    "still_recomputed",
    "new_hooks",
    "hooks_left",
)
"""The keys of evidence whose names, or whose keys, say what a failure is about."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """An earlier report, and where it is."""

    path: Path
    report: AuditReport

    def has(self, check: CheckResult) -> bool:
        """Return whether this failure is known."""
        known = next((k for k in self.report.failures if (k.mode, k.name) == (check.mode, check.name)), None)
        if known is None or known.grade is None or check.grade is None or not known.grade.reaches(check.grade):
            return False
        before, now = _subjects(known.evidence), _subjects(check.evidence)
        if _error_type(known.evidence) != _error_type(check.evidence) or (before and not now):
            return False
        count = known.evidence.get("count", len(before))
        is_cut_short = count > len(before)  # evidence names the first few: others may come to the fore
        return check.evidence.get("count", len(now)) <= count and (is_cut_short or now <= before)


def read_baseline(path: str | Path) -> Baseline:
    """Read a report that was written as JSON."""
    path = Path(path)
    try:
        report = AuditReport.from_json(path.read_text())
    except OSError as error:
        raise CannotAuditError(f"the baseline {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotAuditError(
            f"the baseline {path} is not a report: write one with lowtide audit ... --format json -o {path}"
        ) from error
    return Baseline(path=path, report=report)


def against(report: AuditReport, baseline: Baseline) -> AuditReport:
    """Return the report with the failures marked that the baseline has, too."""
    model = baseline.report.model
    if model != report.model:
        raise CannotAuditError(f"the baseline {baseline.path} is a report about {model}, not {report.model}")
    checks = [dataclasses.replace(check, known=baseline.has(check)) for check in report.checks]
    return dataclasses.replace(report, checks=checks)


def in_both(one: CheckResult, other: CheckResult) -> CheckResult | None:
    """Return a failure with only the names that another failure of the same check has, too; None if there are none.

    Evidence that is cut short says nothing about the names that it leaves out.
    """
    if _error_type(one.evidence) != _error_type(other.evidence):
        return None
    before, now = _subjects(one.evidence), _subjects(other.evidence)
    if not before or before <= now:
        return one
    is_cut_short = any(
        check.evidence.get("count", len(names)) > len(names) for check, names in ((one, before), (other, now))
    )
    if is_cut_short:
        return one
    if not before & now:
        return None
    kept = {key: _kept(key, one.evidence[key], now) for key in _NAMES if key in one.evidence}
    summary = f"{one.summary} (with other weights and another batch, too: {len(before & now)} of {len(before)})"
    count = {"count": len(before & now)} if "count" in one.evidence else {}
    return dataclasses.replace(one, summary=summary, evidence=one.evidence | kept | count)


def _kept(key: str, names: Any, subjects: set[str]) -> Any:
    if isinstance(names, dict):
        return {name: value for name, value in names.items() if f"{key}: {name}" in subjects}
    return [name for name in names if f"{key}: {name}" in subjects]


def _error_type(evidence: dict[str, Any]) -> str:
    """Return the class of the error that a failure is; empty if it is none."""
    return str(evidence.get("error", "")).partition(":")[0]


def _subjects(evidence: dict[str, Any]) -> set[str]:
    return {f"{key}: {name}" for key in _NAMES for name in evidence.get(key, ())}
