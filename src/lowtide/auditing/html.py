"""The report as a page: verdicts with their evidence, which blocks ran again, and what each of them held.

What each block held after forward: in the plain model, and in each mode beside it.

One chart for each stack, under one another and to one scale, so that a tower that holds little looks so. Those that
hold most come first; a model of hundreds of stacks (experts) shows the first few, and says how many there are.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any

from lowtide.auditing.report import Verdict
from lowtide.html import COLOURS, TEMPLATES, chart, render, unit_for
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.auditing.report import AuditReport, CheckResult

_TEMPLATE = TEMPLATES / "audit.html"

_ORDER = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.NOT_APPLICABLE)


def as_html(report: AuditReport) -> str:
    """One file that needs no network. Needs the `html` extra."""
    return render(
        _TEMPLATE,
        report=report,
        counts=_counts(report.checks),
        modes={mode: _worst_first(checks) for mode, checks in _by_mode(report).items()},
        maps={mode: _stacks(blocks) for mode, blocks in report.blocks.items() if blocks},
        chart=memory_chart(report.blocks),
    )


def _counts(checks: list[CheckResult]) -> dict[str, int]:
    verdicts = [check.verdict for check in checks]
    return {str(verdict): verdicts.count(verdict) for verdict in _ORDER if verdict in verdicts}


def _by_mode(report: AuditReport) -> dict[str, list[CheckResult]]:
    found: dict[str, list[CheckResult]] = {}
    for check in report.checks:
        found.setdefault(check.mode, []).append(check)
    return found


def _worst_first(checks: list[CheckResult]) -> list[CheckResult]:
    """What needs a reader comes first; among equals the order of the report."""
    return sorted(checks, key=lambda check: _ORDER.index(check.verdict))


def _stacks(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the map. A cell goes by its name inside of the stack."""
    return [
        {
            "name": stack or "the model itself",
            "blocks": [block | {"label": block["name"].removeprefix(f"{stack}.")} for block in members],
        }
        for stack, members in itertools.groupby(blocks, key=lambda block: block["stack"])
    ]


_MOST_STACKS = 12

_BARS, _GAP, _ABOVE, _BELOW = 120, 70, 70, 34
"""Pixels: a stack's bars, its axis with the next one's name, and the margins."""

Blocks = list[dict[str, Any]]


def memory_chart(blocks: dict[str, Blocks]) -> dict[str, Any] | None:
    """The chart as HTML with the number of stacks that it leaves out; None if no block held anything."""
    measured = {mode: found for mode, found in blocks.items() if any(b["plain_bytes"] or b["bytes"] for b in found)}
    if not measured:
        return None
    stacks = _largest_first(next(iter(measured.values())))
    shown = dict(list(stacks.items())[:_MOST_STACKS])
    unit, factor = unit_for(_largest(measured))
    html = chart(_bars(measured, shown, factor), _layout(shown, unit), name="memory")
    return {"html": html, "stacks": len(shown), "left_out": len(stacks) - len(shown)}


def _largest_first(blocks: Blocks) -> dict[str, int]:
    """The number of blocks by stack."""
    held, count = collections.Counter[str](), collections.Counter[str]()
    for block in blocks:
        held[block["stack"]] += block["plain_bytes"]
        count[block["stack"]] += 1
    return {stack: count[stack] for stack, _ in held.most_common()}


def _largest(blocks: dict[str, Blocks]) -> int:
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
