"""The result of an audit: one verdict for each check, with its evidence and a remedy; as text and as strict JSON.

`AuditReport` is data first; `as_text` and `as_json` below write it for people and for programs, `html` and `ci` for
browsers and for CI systems. JSON has no word for NaN and the infinities, so they are written as the strings "NaN",
"Infinity" and "-Infinity", which Python's `float` reads back.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
from typing import Any

RUNS = "runs"
"""The name of the check that stands for all others if a set-up raises before anything can be observed."""

REFUSAL = "refusal"
"""The key in that check's evidence under which Lowtide's message stands, if Lowtide refused the set-up."""

GRADIENTS = ("gradients present", "gradient values")
"""The checks that are the proof. If one of them was run and is inconclusive, the report is not ok."""

SIGNS = {"pass": "ok", "fail": "FAIL", "inconclusive": "?", "not applicable": "-"}
"""Verdicts in the short form of the text report."""


class Verdict(enum.StrEnum):
    """What a check concludes."""

    PASS = "pass"  # noqa: S105  (a verdict)
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    """The run could not tell: if all gradients are zero, equal gradients prove nothing."""
    NOT_APPLICABLE = "not applicable"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The outcome of one check in one mode."""

    name: str
    mode: str
    verdict: Verdict
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The names and numbers behind the verdict, as plain data."""
    remedy: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport:
    """All checks of one model."""

    __module__ = "lowtide"

    model: str
    checks: list[CheckResult]
    blocks: dict[str, list[dict[str, Any]]]
    """By mode: every block with its calls in forward and in backward, and the bytes that it held after forward."""
    seed: int

    @property
    def ok(self) -> bool:
        """Whether nothing failed, at least one check passed, and no check of the gradients is inconclusive."""
        verdicts = {check.verdict for check in self.checks}
        return Verdict.FAIL not in verdicts and Verdict.PASS in verdicts and not self.unproven

    @property
    def failures(self) -> list[CheckResult]:
        return [check for check in self.checks if check.verdict is Verdict.FAIL]

    @property
    def unproven(self) -> list[CheckResult]:
        """The inconclusive checks of the gradients: their summaries say why, their remedies what would settle it."""
        return [check for check in self.checks if check.verdict is Verdict.INCONCLUSIVE and check.name in GRADIENTS]

    @property
    def conclusion(self) -> str:
        """The verdict in a few words: ok, or why not."""
        if self.failures:
            return f"{len(self.failures)} of {len(self.checks)} checks failed"
        if self.unproven:
            return "nothing failed, but the gradients are not proven right"
        return "ok" if self.ok else "no check passed: nothing is proven"

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
            "seed": self.seed,
            "checks": [check.to_dict() for check in self.checks],
            "blocks": self.blocks,
        }

    def to_json(self) -> str:
        """Return the report as strict JSON: numbers that are not finite are strings such as "NaN"."""
        return as_json(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return the report as one HTML page that loads nothing. Needs the `html` extra."""
        from lowtide.auditing.html import as_html

        return as_html(self)


def as_text(report: AuditReport) -> str:
    """Write one line for each check, with the remedy below what failed or could not tell."""
    lines = [f"{report.model}: {'ok' if report.ok else 'not ok'}"]
    for mode, checks in itertools.groupby(report.checks, key=lambda check: check.mode):
        lines.append(f"[{mode}]")
        for check in checks:
            lines.append(f"  {SIGNS[check.verdict]:<5} {check.name}: {check.summary}")
            if check.verdict in ("fail", "inconclusive") and check.remedy:
                lines.append(f"        remedy: {check.remedy}")
    return "\n".join(lines)


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Write plain data as JSON that every parser takes."""
    return json.dumps(_with_strings_for_nonfinite(value), indent=indent, allow_nan=False)


def _with_strings_for_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _with_strings_for_nonfinite(held) for name, held in value.items()}
    return [_with_strings_for_nonfinite(held) for held in value] if isinstance(value, list | tuple) else value


def first_few(names: list[str], limit: int = 8) -> list[str]:
    """Shorten a list of names for a report; the caller says beside it how many there are."""
    return names[:limit]
