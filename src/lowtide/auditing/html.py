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
from lowtide.html import COLOURS, TEMPLATES, chart, render, unit_for
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
_BARS, _GAP, _ABOVE, _BELOW = 120, 70, 70, 34
"""Pixels: the height of a stack's bars, of its axis with the next stack's name, and the margins."""


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
    """Return the chart as HTML with the number of stacks that it leaves out; None if no block held anything."""
    measured = {mode: found for mode, found in blocks.items() if any(b["plain_bytes"] or b["bytes"] for b in found)}
    if not measured:
        return None
    stacks = _stack_lengths(next(iter(measured.values())))
    shown = dict(list(stacks.items())[:_MOST_STACKS])
    unit, factor = unit_for(_largest_block(measured))
    html = chart(_bars(measured, shown, factor), _layout(shown, unit), name="memory")
    return {"html": html, "stacks": len(shown), "left_out": len(stacks) - len(shown)}


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


def _bars(blocks: dict[str, Blocks], stacks: dict[str, int], factor: int) -> list[dict[str, Any]]:
    first = next(iter(blocks.values()))
    series = [("plain", "plain_bytes", first), *((mode, "bytes", found) for mode, found in blocks.items())]
    return [
        _bar(
            label, figure, [block for block in found if block["stack"] == stack], row=row, colour=colour, factor=factor
        )
        for row, stack in enumerate(stacks)
        for colour, (label, figure, found) in enumerate(series)
    ]


def _bar(label: str, figure: str, blocks: Blocks, *, row: int, colour: int, factor: int) -> dict[str, Any]:
    axis = "" if row == 0 else str(row + 1)
    return {
        "type": "bar",
        "name": label,
        "legendgroup": label,
        "showlegend": row == 0,
        "x": [block["name"].removeprefix(f"{block['stack']}.") for block in blocks],
        "y": [block[figure] / factor for block in blocks],
        "customdata": [f"{block['name']}: {format_bytes(block[figure])}" for block in blocks],
        "hovertemplate": f"{label}<br>%{{customdata}}<extra></extra>",
        "marker": {"color": COLOURS[colour % len(COLOURS)]},
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
    }


def _layout(stacks: dict[str, int], unit: str) -> dict[str, Any]:
    inner = _BARS * len(stacks) + _GAP * (len(stacks) - 1)
    layout: dict[str, Any] = {
        "barmode": "group",
        "bargap": 0.3,
        "height": inner + _ABOVE + _BELOW,
        "margin": {"l": 60, "r": 16, "t": _ABOVE, "b": _BELOW},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "yref": "container"},
        "annotations": [],
    }
    widest = max(stacks.values())
    for row, stack in enumerate(stacks):
        axis = "" if row == 0 else str(row + 1)
        top = inner - row * (_BARS + _GAP)
        layout[f"xaxis{axis}"] = {"type": "category", "anchor": f"y{axis}", "range": [-0.5, widest - 0.5]}
        layout[f"yaxis{axis}"] = {
            "domain": [(top - _BARS) / inner, top / inner],
            "anchor": f"x{axis}",
            "title": {"text": unit},
            "rangemode": "tozero",
            "nticks": 5,
        } | ({"matches": "y"} if row else {})
        layout["annotations"].append(_heading(stack or "the model itself", top / inner))
    return layout


def _heading(text: str, top: float) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"}
    return {"text": text, "showarrow": False, **place}
