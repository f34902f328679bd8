"""What an audit says: one verdict per check, with the evidence for it and a remedy.

The report as plain text: a line per check, remedies under what failed.

JSON that every reader takes: it has no word for what is no finite number, so that is written as a string.

`float("Infinity")`, `float("-Infinity")` and `float("NaN")` read these strings back.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
from typing import Any

RUNS = "runs"
"""The check in the place of all others, if a set-up raises before anything can be looked at."""

REFUSAL = "refusal"
"""In the evidence of that check: Lowtide's own words, if it was Lowtide that refused."""

GRADIENTS = ("gradients present", "gradient values")
"""The checks that are the proof. If one of them was run and could not tell, the report is not ok."""


class Verdict(enum.StrEnum):
    PASS = "pass"  # noqa: S105  (a verdict)
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    """The run could not tell: an experiment without force (all gradients zero) proves nothing."""
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
    """Names and numbers behind it, as plain data."""
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
        """Nothing failed, at least one check passed, and no question about gradients is left open."""
        verdicts = {check.verdict for check in self.checks}
        return Verdict.FAIL not in verdicts and Verdict.PASS in verdicts and not self.unproven

    @property
    def failures(self) -> list[CheckResult]:
        return [check for check in self.checks if check.verdict is Verdict.FAIL]

    @property
    def unproven(self) -> list[CheckResult]:
        """Checks of the gradients that could not tell: the summary says why, the remedy how they can."""
        return [check for check in self.checks if check.verdict is Verdict.INCONCLUSIVE and check.name in GRADIENTS]

    @property
    def conclusion(self) -> str:
        """In a few words: ok, or why not."""
        if self.failures:
            return f"{len(self.failures)} of {len(self.checks)} checks failed"
        if self.unproven:
            return "nothing failed, but the gradients are not proven right"
        return "ok" if self.ok else "no check passed: nothing is proven"

    def __getitem__(self, name: str) -> CheckResult:
        """The check with this name; where there are several modes, as `"mode: name"`."""
        for check in self.checks:
            if name in (check.name, f"{check.mode}: {check.name}"):
                return check
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "ok": self.ok,
            "seed": self.seed,
            "checks": [check.to_dict() for check in self.checks],
            "blocks": self.blocks,
        }

    def to_json(self) -> str:
        """What is no finite number is a string there: JSON has no word for it."""
        return as_json(self.to_dict(), indent=2)

    def __str__(self) -> str:

        return as_text(self)

    def to_html(self) -> str:  # the `html` extra
        from lowtide.auditing.html import as_html

        return as_html(self)


SIGNS = {"pass": "ok", "fail": "FAIL", "inconclusive": "?", "not applicable": "-"}


def as_text(report: AuditReport) -> str:
    lines = [f"{report.model}: {'ok' if report.ok else 'not ok'}"]
    for mode, checks in itertools.groupby(report.checks, key=lambda check: check.mode):
        lines.append(f"[{mode}]")
        for check in checks:
            lines.append(f"  {SIGNS[check.verdict]:<5} {check.name}: {check.summary}")
            if check.verdict in ("fail", "inconclusive") and check.remedy:
                lines.append(f"        remedy: {check.remedy}")
    return "\n".join(lines)


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Plain data as JSON."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(held) for name, held in value.items()}
    return [_finite(held) for held in value] if isinstance(value, list | tuple) else value


def some(names: list[str], limit: int = 8) -> list[str]:
    """The first few, for a report; how many there are stands beside them."""
    return names[:limit]
