"""Writes the report as a page: verdicts with their evidence, which blocks ran again, and what each of them held.

The memory chart shows what each block held after forward: in the plain model, and in each mode beside it. The stacks'
charts stand under one another and share one scale, so that a tower that holds little looks it. Those that hold most
come first; a model with hundreds of stacks (experts) shows the first few, and says how many are left out.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any

from lowtide.auditing.grades import Grade
from lowtide.auditing.result import Verdict
from lowtide.charts import Scale, Series, columns
from lowtide.html import COLOURS, TEMPLATES, render, unit_for
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.auditing.report import AuditReport
    from lowtide.auditing.result import CheckResult

Blocks = list[dict[str, Any]]
"""Blocks of one mode, as `AuditReport.blocks` has them."""

_TEMPLATE = TEMPLATES / "audit.html"
_WORST_FIRST = [
    *map(str, reversed(Grade)),
    *map(str, (Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.NOT_APPLICABLE)),
]
_MOST_STACKS = 12
_HEIGHT = 120
"""The height of a stack's columns."""


def as_html(report: AuditReport) -> str:
    """Write one HTML file that loads nothing from the network. Needs the `html` extra."""
    return render(
        _TEMPLATE,
        report=report,
        counts=_counts(report.checks),
        modes={mode: _worst_first(checks) for mode, checks in _by_mode(report).items()},
        maps={mode: _stacks(blocks) for mode, blocks in report.blocks.items() if blocks},
        chart=memory_chart(report.blocks),
    )


def _counts(checks: list[CheckResult]) -> dict[str, int]:
    labels = [check.label for check in checks]
    return {label: labels.count(label) for label in _WORST_FIRST if label in labels}


def _by_mode(report: AuditReport) -> dict[str, list[CheckResult]]:
    found: dict[str, list[CheckResult]] = {}
    for check in report.checks:
        found.setdefault(check.mode, []).append(check)
    return found


def _worst_first(checks: list[CheckResult]) -> list[CheckResult]:
    """Sort what needs a reader's attention to the front; the report's order decides among equals."""
    return sorted(checks, key=lambda check: _WORST_FIRST.index(check.label))


def _stacks(blocks: Blocks) -> list[dict[str, Any]]:
    """Return the rows of the map of blocks. A cell is labelled with its name inside the stack."""
    return [
        {
            "name": stack or "the model itself",
            "blocks": [block | {"label": block["name"].removeprefix(f"{stack}.")} for block in members],
        }
        for stack, members in itertools.groupby(blocks, key=lambda block: block["stack"])
    ]


def memory_chart(blocks: dict[str, Blocks]) -> dict[str, Any] | None:
    """Return a chart for each stack, and how many are left out; None if no block held anything."""
    measured = {mode: found for mode, found in blocks.items() if any(b["plain_bytes"] or b["bytes"] for b in found)}
    if not measured:
        return None
    stacks = _stack_lengths(next(iter(measured.values())))
    shown = dict(list(stacks.items())[:_MOST_STACKS])
    unit, factor = unit_for(_largest_block(measured))
    scale = Scale(_largest_block(measured) / factor, max(shown.values()), _HEIGHT)
    drawn = {
        stack or "the model itself": columns(f"memory-{row}", names, series, unit=unit, scale=scale)
        for row, stack in enumerate(shown)
        for names, series in [_series(measured, stack, factor)]
    }
    return {"drawn": drawn, "stacks": len(shown), "left_out": len(stacks) - len(shown)}


def _stack_lengths(blocks: Blocks) -> dict[str, int]:
    """Return the number of blocks by stack; the stacks that hold most come first."""
    held, count = collections.Counter[str](), collections.Counter[str]()
    for block in blocks:
        held[block["stack"]] += block["plain_bytes"]
        count[block["stack"]] += 1
    return {stack: count[stack] for stack, _ in held.most_common()}


def _largest_block(blocks: dict[str, Blocks]) -> int:
    return max(
        int(block[figure]) for found in blocks.values() for block in found for figure in ("plain_bytes", "bytes")
    )


def _series(blocks: dict[str, Blocks], stack: str, factor: int) -> tuple[list[str], list[Series]]:
    """Return the names of a stack's blocks, and what they hold in the plain model and in each mode."""
    first = next(iter(blocks.values()))
    names = [block["name"].removeprefix(f"{stack}.") for block in first if block["stack"] == stack]
    series = []
    for number, (label, figure, found) in enumerate(
        [("plain", "plain_bytes", first), *((mode, "bytes", found) for mode, found in blocks.items())]
    ):
        members = [block for block in found if block["stack"] == stack]
        titles = [f"{label}: {block['name']}: {format_bytes(block[figure])}" for block in members]
        colour = COLOURS[number % len(COLOURS)]
        series.append(Series(label, colour, [block[figure] / factor for block in members], titles))
    return names, series
