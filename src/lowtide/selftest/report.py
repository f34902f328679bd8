"""Writes a record as text: a line for each row, by stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.auditing.report import SIGNS
from lowtide.auditing.result import Verdict

if TYPE_CHECKING:
    from lowtide.selftest.record import Record, StageResult

QUESTIONS = {
    "right": "Are the gradients right?",
    "frees": "Does it free what it should?",
    "overlaps": "Do copies run beside kernels?",
    "plans": "Are plans right?",
    "peers": "How do others do?",
    "ranks": "Is it right on several devices?",
}


def word_for(stage: StageResult) -> str:
    """Return a stage's verdict; `measured` if it has rows of which none is judged."""
    return "measured" if stage.rows and stage.verdict is Verdict.NOT_APPLICABLE else str(stage.verdict)


def as_text(record: Record) -> str:
    """Write a record for a terminal or a file."""
    lines = [headline(record), f"{record.seconds:.0f} s, failures count from {record.fail_on} on"]
    for stage in record.stages:
        lines.append(f"[{stage.name}] {QUESTIONS[stage.name]} {word_for(stage)} ({stage.seconds:.0f} s)")
        lines += [f"  {SIGNS.get(row.label, row.label):<9} {row.name}: {row.summary}" for row in stage.rows]
        lines += [f"  not run: {stage.why}"] if stage.why else []
    return "\n".join(lines)


def headline(record: Record) -> str:
    """Say in one line what was tested, and the conclusion."""
    device = record.environment["device"]
    kind = "quick self-test" if record.quick else "self-test"
    return f"{kind} of {device['name']}, torch {record.environment['packages']['torch']}: {record.conclusion}"
