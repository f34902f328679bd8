"""Keeps the result of a self-test as data: rows with figures, in stages, with the machine that they were measured on.

A record is strict JSON. It holds what was measured in that run and nothing that names a person or a machine: no host
name, no user, no paths. `docs/hardware/schema.json` describes it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from lowtide.auditing.grades import Grade
from lowtide.auditing.report import as_json
from lowtide.auditing.result import Verdict
from lowtide.errors import InvalidValueError
from lowtide.selftest.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
"""The version of the format. It changes when a reader of older records would misread newer ones."""

PROOF = "right"
"""The stage without which nothing else counts: if it did not pass, the self-test did not."""

STAGE_NAMES = ("right", "frees", "overlaps", "plans", "peers", "ranks")
"""All stages, in the order in which they run."""

_PATH = re.compile(
    r"file://\S+"
    r"|(?<![\w.:/@-])(?:[\w.@-]+:)?(?:/[\w.@+~-]+){2,}/?"  # with the host before it, if there is one
    r"|[A-Za-z]:\\[\\\w.@+~-]+"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was measured, with its verdict; None for a figure that has no threshold."""

    name: str
    verdict: Verdict | None
    summary: str
    """One sentence for people."""
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    grade: Grade | None = None
    """How bad the failure is. A grade that is given is that of a failure: it goes if the row did not fail."""

    def __post_init__(self) -> None:
        failed = self.verdict is Verdict.FAIL
        object.__setattr__(self, "grade", (self.grade or Grade.WRONG) if failed else None)

    @property
    def label(self) -> str:
        """The grade of a failure, else the verdict; empty for a figure that has no threshold."""
        return str(self.grade or self.verdict or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageResult:
    """What one stage found, or why it could not run."""

    name: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    why: str = ""
    """Why the stage, or a part of it, could not run."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of the rows; not applicable if the stage could not run."""
        verdicts = {row.verdict for row in self.rows}
        worst = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
        return next((verdict for verdict in worst if verdict in verdicts), Verdict.NOT_APPLICABLE)

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.verdict is Verdict.FAIL]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A whole self-test, or as much of it as has run."""

    quick: bool
    date: str
    """The day on which it was finished, in UTC."""
    environment: dict[str, Any]
    stages: list[StageResult]
    ranks: int = 1
    """How many processes the stage `ranks` had."""
    fail_on: Grade = Grade.UNSAFE
    """The mildest grade that counts: a milder failure is reported, and the record is ok all the same."""
    thresholds: dict[str, Any] = dataclasses.field(default_factory=lambda: dataclasses.asdict(THRESHOLDS))

    @property
    def seconds(self) -> float:
        """How long the stages took."""
        return round(sum(stage.seconds for stage in self.stages), 1)

    @property
    def ok(self) -> bool:
        """Whether the gradients are proven right, and nothing failed that counts."""
        verdicts = {stage.name: stage.verdict for stage in self.stages}
        return verdicts.get(PROOF) is Verdict.PASS and not self._failed(counts=True)

    @property
    def conclusion(self) -> str:
        """The verdict in a few words: ok, or why not; then what failed without counting, and what is not proven."""
        said = [f"failed: {stages}"] if (stages := self._failed(counts=True)) else ["ok"] if self.ok else []
        if not said:
            said = ["nothing failed, but the gradients are not proven right"]
        if milder := self._failed(counts=False):
            said.append(f"does not count: {milder}")
        unproven = [stage.name for stage in self.stages if stage.verdict is Verdict.INCONCLUSIVE]
        if unproven:
            said.append(f"not proven: {', '.join(unproven)}")
        ran = {stage.name for stage in self.stages}
        if missing := [name for name in STAGE_NAMES if name not in ran]:
            said.append(f"did not run: {', '.join(missing)}")
        return "; ".join(said)

    def _failed(self, *, counts: bool) -> str:
        """Name the stages with failures that count, or that do not, each with the worst grade of them."""
        worst: dict[str, Grade] = {}
        for stage in self.stages:
            for row in stage.failures:
                if row.grade is not None and row.grade.reaches(self.fail_on) == counts:
                    held = worst.get(stage.name, row.grade)
                    worst[stage.name] = row.grade if row.grade.reaches(held) else held
        return ", ".join(f"{name} ({grade})" for name, grade in worst.items())

    def __getitem__(self, name: str) -> StageResult:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "quick": self.quick,
            "date": self.date,
            "ok": self.ok,
            "conclusion": self.conclusion,
            "fail_on": self.fail_on,
            "ranks": self.ranks,
            "seconds": self.seconds,
            "environment": self.environment,
            "thresholds": self.thresholds,
            "stages": [{**dataclasses.asdict(stage), "verdict": stage.verdict} for stage in self.stages],
        }

    def to_json(self) -> str:
        """Return the record as strict JSON: numbers that are not finite are strings such as "NaN"."""
        return as_json(self.to_dict(), indent=2) + "\n"


def read_record(path: Path) -> Record:
    """Read a record from a file."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise InvalidValueError(
                f"{path} is a record of format {data['format']}, and this version reads format {FORMAT}: run the "
                "self-test again"
            )
        return Record(
            quick=data["quick"],
            date=data["date"],
            environment=data["environment"],
            ranks=data.get("ranks", 1),
            fail_on=Grade(data.get("fail_on", Grade.UNSAFE)),
            thresholds=data["thresholds"],
            stages=[_stage(stage) for stage in data["stages"]],
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, InvalidValueError):
            raise
        raise InvalidValueError(
            f"{path} is not a record of a self-test ({type(error).__name__}: {error}): give a file that "
            "`lowtide selftest -o` wrote"
        ) from error


def _stage(data: dict[str, Any]) -> StageResult:
    rows = [_row(row) for row in data["rows"]]
    return StageResult(name=data["name"], rows=rows, why=data["why"], seconds=data["seconds"])


def _row(data: dict[str, Any]) -> Row:
    verdict, grade = data["verdict"], data.get("grade")  # older records have no grades
    read = {
        "verdict": None if verdict is None else Verdict(verdict),
        "grade": None if grade is None else Grade(grade),
    }
    return Row(**{**data, **read})


def without_paths(text: str) -> str:
    """Return the first line of a message with every path left out."""
    line = (text.strip().splitlines() or [""])[0]
    return _PATH.sub("<path>", line)[:300]
