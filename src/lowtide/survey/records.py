"""What a survey writes down: a line of JSON per architecture, so that it can be watched, and resumed."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

Status = Literal["audited", "no checkpointing", "refused", "not built", "failed to run", "timed out"]


@dataclasses.dataclass(kw_only=True)
class Record:
    """One architecture under one engine."""

    model_type: str
    engine: str
    status: Status
    versions: dict[str, str]
    command: str
    """Repeats this audit."""
    model_class: str | None = None
    why: str | None = None
    """Why it was not audited, or was refused."""
    seconds: float = 0.0
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Failed checks that failed again with other weights and another batch."""
    unconfirmed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Failed checks that did not."""
    verdicts: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """By mode and check."""
    stacks: list[str] = dataclasses.field(default_factory=list)
    """The stacks of blocks that ran, with the number of blocks."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def read_records(path: Path) -> list[Record]:
    """The records of a file; the last one of an architecture counts. A killed run may leave half a line."""
    found: dict[tuple[str, str], Record] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            record = Record(**json.loads(line))
        except json.JSONDecodeError:
            continue
        found[record.model_type, record.engine] = record
    return list(found.values())
