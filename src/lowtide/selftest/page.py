"""Writes a record as a page: verdicts by stage, memory expected beside seen, steps planned beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.charts import Series, columns
from lowtide.html import COLOURS, TEMPLATES, render, unit_for
from lowtide.selftest.report import QUESTIONS
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.selftest.record import Record, Row

_TEMPLATE = TEMPLATES / "selftest.html"


def as_html(record: Record) -> str:
    """Write one HTML file that loads nothing from the network. Needs the `html` extra."""
    return render(_TEMPLATE, record=record, questions=QUESTIONS, charts=_charts(record))


def _charts(record: Record) -> dict[str, str]:
    """Return the charts of those stages that have some."""
    freed = [row for row in _rows(record, "frees") if "expected_peak_bytes" in row.figures]
    planned = [row for row in _rows(record, "plans") if "planned_peak_bytes" in row.figures]
    found = {
        "frees": (freed, {"expected": "expected_peak_bytes", "seen": "peak_bytes"}),
        "plans": (planned, {"planned": "planned_peak_bytes", "measured": "peak_bytes"}),
    }
    drawn: dict[str, str] = {}
    for stage, (rows, series) in found.items():
        if rows:
            drawn[stage] = _bars(rows, series, name=f"peaks-{stage}")
    return drawn


def _rows(record: Record, stage: str) -> list[Row]:
    return next((found.rows for found in record.stages if found.name == stage), [])


def _bars(rows: list[Row], series: dict[str, str], *, name: str) -> str:
    unit, factor = unit_for(max(row.figures[figure] for row in rows for figure in series.values()))
    drawn = [
        Series(
            label,
            COLOURS[number],
            [row.figures[figure] / factor for row in rows],
            [f"{row.name}: {label}: {format_bytes(row.figures[figure])}" for row in rows],
        )
        for number, (label, figure) in enumerate(series.items())
    ]
    return columns(name, [row.name for row in rows], drawn, unit=unit)
