"""Keeps the result of a self-test as data: rows with figures, in stages, with the machine that they were measured on.

A record is strict JSON. It holds what was measured in that run and nothing that names a person or a machine: no host
name, no user, no paths. `docs/hardware/schema.json` describes it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

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

_PATH = re.compile(r"(?<![\w.:/])(?:/[\w.@+~-]+){2,}/?|[A-Za-z]:\\[\\\w.@+~-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was measured, with its verdict; None for a figure that has no threshold."""

    name: str
    verdict: Verdict | None
    summary: str
    """One sentence for people."""
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


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
    """A whole self-test."""

    quick: bool
    date: str
    """The day on which it was finished, in UTC."""
    environment: dict[str, Any]
    stages: list[StageResult]
    thresholds: dict[str, Any] = dataclasses.field(default_factory=lambda: dataclasses.asdict(THRESHOLDS))

    @property
    def ok(self) -> bool:
        """Whether the gradients are proven right, and nothing failed."""
        verdicts = {stage.name: stage.verdict for stage in self.stages}
        return verdicts.get(PROOF) is Verdict.PASS and Verdict.FAIL not in verdicts.values()

    @property
    def conclusion(self) -> str:
        """The verdict in a few words: ok, or why not."""
        failed = [stage.name for stage in self.stages if stage.verdict is Verdict.FAIL]
        if failed:
            return f"failed: {', '.join(failed)}"
        return "ok" if self.ok else "nothing failed, but the gradients are not proven right"

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
    rows = [
        Row(**{**row, "verdict": None if row["verdict"] is None else Verdict(row["verdict"])}) for row in data["rows"]
    ]
    return StageResult(name=data["name"], rows=rows, why=data["why"], seconds=data["seconds"])


def without_paths(text: str) -> str:
    """Return the first line of a message with every path left out."""
    line = (text.strip().splitlines() or [""])[0]
    return _PATH.sub("<path>", line)[:300]
