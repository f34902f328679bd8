"""Figures that know what they are worth: a count must repeat exactly, a ratio has a spread, seconds are one machine's.

A section measures rows of figures. Its result goes to `bench/results/NAME.json`, with the environment it came from;
tables, plots and comparisons are all made of that file.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"

Kind = Literal["count", "verdict", "ratio", "measured", "seconds"]
EXACT: tuple[Kind, ...] = ("count", "verdict")
"""Kinds that must repeat: bytes, FLOPs and virtual time are counted, and a verdict is "right" or says what is not.
Ratios, and bytes that the operating system measured, are noisy; seconds are of one machine, and never compared."""

FINE = ("equal", "right")
"""Verdicts that find no fault."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One value. A ratio is the median over `rounds`, and `low` to `high` are its quartiles."""

    kind: Kind
    value: float | str
    unit: str = ""
    rounds: int | None = None
    low: float | None = None
    high: float | None = None


def count(value: float, unit: str = "") -> Figure:
    return Figure(kind="count", value=value, unit=unit)


def verdict(value: str) -> Figure:
    return Figure(kind="verdict", value=value)


def measured(value: float, unit: str) -> Figure:
    return Figure(kind="measured", value=value, unit=unit)


def seconds(value: float) -> Figure:
    return Figure(kind="seconds", value=value, unit="s")


def ratio(values: list[float]) -> Figure:
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return Figure(kind="ratio", value=middle, rounds=len(values), low=low, high=high)


Rows = dict[str, dict[str, Figure]]


@dataclasses.dataclass
class Result:
    """What one section found: rows by name, and who was left out and why."""

    setting: dict[str, Any]
    rows: Rows
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    raw: str = ""
    """The stored text, if it has another form."""

    def as_json(self) -> str:
        """Without what a figure does not have."""
        if self.raw:
            return self.raw
        data = dataclasses.asdict(self)
        del data["raw"]
        for row in data["rows"].values():
            for name, figure in row.items():
                row[name] = {field: value for field, value in figure.items() if value not in (None, "")}
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Result:
        data = json.loads(text)
        rows = {name: {figure: Figure(**held) for figure, held in row.items()} for name, row in data["rows"].items()}
        return cls(data["setting"], rows, data["left_out"], data["environment"])


def path_of(section: str) -> Path:
    return RESULTS / f"{section}.json"
