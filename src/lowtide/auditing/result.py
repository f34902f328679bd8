"""Holds what one check says about one set-up: a verdict, a grade if it failed, the evidence and a remedy."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from lowtide.auditing.grades import GRADES, Grade

RUNS = "runs"
"""The name of the check that stands for all others if a set-up raises before anything can be observed."""

REFUSAL = "refusal"
"""The key in that check's evidence under which Lowtide's message stands, if Lowtide refused the set-up."""


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
    escalated: Grade | None = None
    """The grade of this failure, if it is not the usual one of its check."""
    known: bool = False
    """Whether a baseline has this failure: then the report is ok all the same."""

    @property
    def grade(self) -> Grade | None:
        """How bad the failure is; None if the check did not fail."""
        return (self.escalated or GRADES.get(self.name, Grade.WRONG)) if self.verdict is Verdict.FAIL else None

    @property
    def label(self) -> str:
        """The grade of a failure, else the verdict."""
        return str(self.grade or self.verdict)

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        del data["escalated"]
        return data | {"grade": self.grade}


def first_few(names: list[str], limit: int = 8) -> list[str]:
    """Shorten a list of names for a report; the caller says beside it how many there are."""
    return names[:limit]


def listed(names: list[str], limit: int = 4) -> str:
    """Write names in a row, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
