"""What a survey writes down: a line of JSON per architecture, so that it can be watched, and resumed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import TYPE_CHECKING, Any, Literal

from lowtide.auditing.report import as_json

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
    """Repeats this audit; that of Lowtide's engine without tiles, so a failure has its own `command`."""
    model_class: str | None = None
    why: str | None = None
    """Why it was not audited or was refused, or why failures could not be confirmed."""
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
        return as_json(dataclasses.asdict(self))


def command_for(model_type: str, engine: str, mode: str | None = None) -> str:
    """Repeats an audit; where the mode is a policy, under this one."""
    if mode is None or engine != "lowtide":
        return f"lowtide audit {model_type} --engine {engine}"
    return f"lowtide audit {model_type} --policy {shlex.quote(mode)}"


def unfinished(model_type: str, engine: str, status: Status, why: str, seconds: float = 0.0) -> Record:
    """Of an architecture whose process gave no record."""
    return Record(
        model_type=model_type,
        engine=engine,
        status=status,
        versions={},
        command=command_for(model_type, engine),
        why=why,
        seconds=round(seconds, 2),
    )


def surveyed(path: Path, engine: str) -> set[str]:
    """The model types of which a file has this engine's record."""
    return {record.model_type for record in read_records(path) if record.engine == engine}


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
