"""What an audit says: one verdict per check, with the evidence for it and a remedy."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from lowtide.auditing.formats.strict_json import as_json

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
class Check:
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

    model: str
    checks: list[Check]
    blocks: dict[str, list[dict[str, Any]]]
    """By mode: every block with its calls in forward and in backward, and the bytes that it held after forward."""
    seed: int

    @property
    def ok(self) -> bool:
        """Nothing failed, at least one check passed, and no question about gradients is left open."""
        verdicts = {check.verdict for check in self.checks}
        return Verdict.FAIL not in verdicts and Verdict.PASS in verdicts and not self.unproven

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.verdict is Verdict.FAIL]

    @property
    def unproven(self) -> list[Check]:
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

    def __getitem__(self, name: str) -> Check:
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
        from lowtide.auditing.formats.text import as_text

        return as_text(self)

    def to_html(self) -> str:  # the `html` extra
        from lowtide.auditing.formats.html import as_html

        return as_html(self)
