"""Holds the result of an audit: a verdict for each check, with a grade if it failed; as text and as strict JSON.

`AuditReport` is data first; `as_text` and `as_json` below write it for people and for programs, `html` and `ci` for
browsers and for CI systems, and `conclusion` sums it up in a sentence. JSON has no word for NaN and the infinities, so
they are written as the strings "NaN", "Infinity" and "-Infinity", which Python's `float` reads back.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import TYPE_CHECKING, Any

from lowtide.auditing.conclusion import conclude
from lowtide.auditing.grades import Grade
from lowtide.auditing.result import CheckResult, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

GRADIENTS = ("gradients present", "gradient values")
"""The checks that are the proof. If one of them was run and is inconclusive, the report is not ok."""

SIGNS = {"pass": "ok", "inconclusive": "?", "not applicable": "-"}
"""Verdicts in the short form of the text report. A failed check shows its grade."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport:
    """All checks of one model."""

    __module__ = "lowtide"

    model: str
    checks: list[CheckResult]
    blocks: dict[str, list[dict[str, Any]]]
    """By mode: every block with its calls in forward and in backward, and the bytes that it held after forward."""
    seed: int
    fail_on: Grade = Grade.UNSAFE
    """The mildest grade that counts: a milder failure is reported, and the report is ok all the same."""

    @property
    def ok(self) -> bool:
        """Whether nothing failed that counts, some check passed, and no check of the gradients is inconclusive."""
        return not self.counted and any(check.verdict is Verdict.PASS for check in self.checks) and not self.unproven

    @property
    def failures(self) -> list[CheckResult]:
        """All failed checks, whatever their grade."""
        return [check for check in self.checks if check.verdict is Verdict.FAIL]

    @property
    def counted(self) -> list[CheckResult]:
        """The failures for which the report is not ok: as bad as `fail_on` or worse, and not known from a baseline."""
        return [check for check in self.checks if self.counts(check)]

    def counts(self, check: CheckResult) -> bool:
        """Return whether the report is not ok because of this check."""
        return check.grade is not None and check.grade.reaches(self.fail_on) and not check.known

    @property
    def unproven(self) -> list[CheckResult]:
        """The inconclusive checks of the gradients: their summaries say why, their remedies what would settle it."""
        return [check for check in self.checks if check.verdict is Verdict.INCONCLUSIVE and check.name in GRADIENTS]

    @property
    def conclusion(self) -> str:
        """What was found, in one sentence: whether gradients are right, then what failed."""
        return conclude(self.checks, ok=self.ok, unproven=bool(self.unproven))

    def __getitem__(self, name: str) -> CheckResult:
        """Return the check with this name; where there are several modes, `"mode: name"` selects one."""
        for check in self.checks:
            if name in (check.name, f"{check.mode}: {check.name}"):
                return check
        raise KeyError(name)

    def __str__(self) -> str:
        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "ok": self.ok,
            "conclusion": self.conclusion,
            "fail_on": self.fail_on,
            "seed": self.seed,
            "checks": [check.to_dict() for check in self.checks],
            "blocks": self.blocks,
        }

    def to_json(self) -> str:
        """Return the report as strict JSON: numbers that are not finite are strings such as "NaN"."""
        return as_json(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> AuditReport:
        """Return the report that `to_json` wrote; figures that are not finite stay strings."""
        data = json.loads(text)
        return cls(
            model=data["model"],
            checks=[_result(check) for check in data["checks"]],
            blocks=data["blocks"],
            seed=data["seed"],
            fail_on=Grade(data.get("fail_on", Grade.UNSAFE)),
        )

    def to_html(self) -> str:
        """Return the report as one HTML page that loads nothing. Needs the `html` extra."""
        from lowtide.auditing.html import as_html

        return as_html(self)


def _result(data: dict[str, Any]) -> CheckResult:
    known = {field.name: data[field.name] for field in dataclasses.fields(CheckResult) if field.name in data}
    result = CheckResult(**known | {"verdict": Verdict(data["verdict"])})
    grade = data.get("grade")  # older reports have none
    return result if grade in (None, result.grade) else dataclasses.replace(result, escalated=Grade(grade))


def as_text(report: AuditReport) -> str:
    """Write the sentence, then one line for each check, with the remedy below what failed or could not tell."""
    return "\n".join(f"{'' if label is None else f'  {label:<9} '}{text}" for label, text, _ in text_lines(report))


def text_lines(report: AuditReport) -> Iterator[tuple[str | None, str, CheckResult | None]]:
    """Yield the text report line by line: the label of a check's line, its text, and the check; None for headings."""
    yield None, f"{report.model}: {report.conclusion}", None
    for mode, checks in itertools.groupby(report.checks, key=lambda check: check.mode):
        yield None, f"[{mode}]", None
        for check in checks:
            known = " (known)" if check.known else ""
            yield SIGNS.get(check.label, check.label), f"{check.name}: {check.summary}{known}", check
            if check.verdict in ("fail", "inconclusive") and check.remedy:
                yield "", f"remedy: {check.remedy}", check


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Write plain data as JSON that every parser takes."""
    return json.dumps(_with_strings_for_nonfinite(value), indent=indent, allow_nan=False)


def _with_strings_for_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _with_strings_for_nonfinite(held) for name, held in value.items()}
    return [_with_strings_for_nonfinite(held) for held in value] if isinstance(value, list | tuple) else value
