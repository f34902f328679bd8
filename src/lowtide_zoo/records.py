"""Holds what a survey writes down, a line of JSON per architecture, and sums it up.

Lines are written one by one, so that a survey can be watched, and resumed after it was killed. A check that fails for
most models says something about the library, not about the models: a summary lists it apart.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import shlex
from typing import TYPE_CHECKING, Any, Literal

from lowtide.auditing.grades import GRADES, Grade
from lowtide.auditing.report import as_json
from lowtide.auditing.result import RUNS
from lowtide_zoo.subjects import Subject

if TYPE_CHECKING:
    from pathlib import Path

Status = Literal["audited", "no checkpointing", "refused", "not built", "failed to run", "timed out"]

NO_FAILURE = "no failure"
"""The word for an architecture that was audited and has no grade."""

_MOST = 0.5
"""A check fails everywhere if it fails for this share of the audited models, and for two at least. Models that it does
not apply to count as well: what fails for the few that it applies to is not a fact about the library."""


@dataclasses.dataclass(kw_only=True)
class Record:
    """The result of one architecture under one engine."""

    model_type: str
    engine: str
    status: Status
    versions: dict[str, str]
    command: str
    """Repeats this audit. For Lowtide's engine it repeats the one without tiles, so a failure has its own `command`."""
    model_class: str | None = None
    why: str | None = None
    """Why it was not audited or was refused, or why failures could not be confirmed."""
    seconds: float = 0.0
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Failed checks that failed again with other weights and another batch."""
    unconfirmed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Failed checks that did not fail again."""
    verdicts: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Verdicts by mode and check."""
    stacks: list[str] = dataclasses.field(default_factory=list)
    """The stacks of blocks that ran, with the number of blocks."""
    tiled_blocks: list[str] = dataclasses.field(default_factory=list)
    """The regions that ran in tiles as a whole, attention included."""
    subject_class: str = ""
    """The class that was asked for; empty if it was the type's usual one."""
    variant: str = ""
    """The feature that was turned on."""
    shown: dict[str, bool] = dataclasses.field(default_factory=dict)
    """By "mode: check", whether a script without Lowtide showed the failure. Not in it: those for which none was run,
    such as what is only untidy."""
    left_alone: dict[str, str] = dataclasses.field(default_factory=dict)
    """The regions that did not, and why."""

    def __post_init__(self) -> None:
        """Grade failures by their check where a record says nothing: older ones do not."""
        for failure in (*self.failures, *self.unconfirmed):
            failure.setdefault("grade", str(GRADES.get(failure["name"], Grade.WRONG)))

    @property
    def subject(self) -> Subject:
        """What was audited."""
        return Subject(self.model_type, self.subject_class, self.variant)

    @property
    def grades(self) -> list[Grade]:
        """The grades of the failures."""
        return [Grade(failure["grade"]) for failure in self.failures]

    @property
    def worst(self) -> Grade | None:
        """The worst grade of a failure; None if nothing failed."""
        return max(self.grades, key=list(Grade).index, default=None)

    def label(self, failure: dict[str, Any]) -> str:
        """Name a failure by its mode and check, and say if a script did not show it."""
        name = f"{failure['mode']}: {failure['name']}"
        return name if self.shown.get(name, True) else f"{name} (not shown by a script)"

    def worst_in(self, mode: str) -> Grade | None:
        """Return the worst grade of a failure in one mode; None if nothing failed in it."""
        failures = [failure for failure in self.failures if failure["mode"] == mode]
        return dataclasses.replace(self, failures=failures).worst

    def to_json(self) -> str:
        return as_json(dataclasses.asdict(self))


def command_for(subject: Subject, engine: str, mode: str | None = None) -> str:
    """Return the command that repeats an audit; where the mode is a policy, under this policy."""
    target = " ".join(filter(None, [subject.model_type, subject.options]))
    if mode is None or engine != "lowtide":
        return f"lowtide audit {target} --engine {engine}"
    return f"lowtide audit {target} --policy {shlex.quote(mode)}"


def unfinished(subject: Subject, engine: str, status: Status, why: str, seconds: float = 0.0) -> Record:
    """Return a record for an architecture whose process gave none."""
    return Record(
        model_type=subject.model_type,
        subject_class=subject.model_class,
        variant=subject.variant,
        engine=engine,
        status=status,
        versions={},
        command=command_for(subject, engine),
        why=why,
        seconds=round(seconds, 2),
    )


def read_records(path: Path) -> list[Record]:
    """Read the records of a file; the last one of a subject counts. A killed run may have left half a line."""
    found: dict[tuple[Subject, str], Record] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            record = Record(**json.loads(line))
        except json.JSONDecodeError:
            continue
        found[record.subject, record.engine] = record
    return list(found.values())


def surveyed(path: Path, engine: str) -> set[Subject]:
    """Return what a file has a record of under this engine."""
    return {record.subject for record in read_records(path) if record.engine == engine}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """How long a survey took, from the search for its subjects to the last record."""

    seconds: float
    workers: int
    subjects: int
    """How many were audited in it. Others were in the records already, if it was resumed."""

    def __str__(self) -> str:
        workers = "worker" if self.workers == 1 else "workers"
        return f"{self.subjects} audited in {self.seconds / 60:.0f} minutes with {self.workers} {workers}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts over all records of one engine."""

    engine: str
    total: int
    by_status: dict[str, int]
    by_grade: dict[str, int]
    """The number of audited architectures by the worst grade of their failures, the worst first, and without any."""
    by_check: dict[str, int]
    """The number of architectures that fail, by "mode: check"."""
    everywhere: list[str]
    """The checks that fail for most models."""
    failing: dict[str, list[str]]
    """The checks that an architecture fails, without those that fail everywhere."""


def summarize(records: list[Record]) -> Summary:
    """Count the records of one engine."""
    audited = [record for record in records if record.status == "audited" or record.failures]
    counts: collections.Counter[str] = collections.Counter()
    for record in audited:
        counts.update(_failed_checks(record))
    everywhere = {f"{mode}: {check}" for mode, check in fails_everywhere(audited)}
    failing = {
        record.subject.name: names
        for record in audited
        if (names := [record.label(f) for f in record.failures if f"{f['mode']}: {f['name']}" not in everywhere])
    }
    return Summary(
        engine=records[0].engine if records else "",
        total=len(records),
        by_status=dict(collections.Counter(record.status for record in records).most_common()),
        by_grade=_by_grade(audited),
        by_check=dict(counts.most_common()),
        everywhere=sorted(everywhere),
        failing=failing,
    )


def _by_grade(audited: list[Record]) -> dict[str, int]:
    worst = collections.Counter(record.worst for record in audited)
    order: list[Grade | None] = [*reversed(Grade), None]
    return {str(grade or NO_FAILURE): worst[grade] for grade in order if worst[grade]}


def fails_everywhere(records: list[Record]) -> set[tuple[str, str]]:
    """Return the checks, with their modes, that fail for half of the models or more."""
    failed = collections.Counter((f["mode"], f["name"]) for record in records for f in record.failures)
    audited = collections.Counter((mode, c) for r in records for mode, checks in r.verdicts.items() for c in checks)
    return {key for key, count in failed.items() if count >= max(2, _MOST * audited[key]) and key[1] != RUNS}


def _failed_checks(record: Record) -> list[str]:
    return [f"{failure['mode']}: {failure['name']}" for failure in record.failures]
