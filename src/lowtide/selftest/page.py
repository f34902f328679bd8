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


def _charts(record: Record) -> dict[str, list[str]]:
    """Return the charts of each stage that has some."""
    planned = {"planned": "planned_peak_bytes", "measured": "peak_bytes"}
    seconds = {
        "planned from the data sheet": "planned_seconds_before_calibration",
        "planned from measured rates": "planned_seconds",
        "measured": "seconds",
    }
    wanted = (
        ("frees", "peaks", {"expected": "expected_peak_bytes", "seen": "peak_bytes"}),
        ("plans", "peaks", planned),
        ("plans", "steps", seconds),
    )
    drawn: dict[str, list[str]] = {stage.name: [] for stage in record.stages}
    for stage, name, series in wanted:
        rows = [row for row in _rows(record, stage) if row.figures.keys() & set(list(series.values())[:-1])]
        known = {label: figure for label, figure in series.items() if all(row.figures.get(figure) for row in rows)}
        if rows:
            drawn[stage].append(_bars(rows, known, name=f"{name}-{stage}"))
    return drawn


def _rows(record: Record, stage: str) -> list[Row]:
    return next((found.rows for found in record.stages if found.name == stage), [])


def _bars(rows: list[Row], series: dict[str, str], *, name: str) -> str:
    of_bytes = all(figure.endswith("_bytes") for figure in series.values())
    unit, factor = "ms", 1e-3
    if of_bytes:
        unit, factor = unit_for(max(row.figures[figure] for row in rows for figure in series.values()))
    drawn = [
        Series(
            label,
            COLOURS[number],
            [row.figures[figure] / factor for row in rows],
            [f"{row.name}: {label}: {_written(row.figures[figure], of_bytes=of_bytes)}" for row in rows],
        )
        for number, (label, figure) in enumerate(series.items())
    ]
    return columns(name, [row.name for row in rows], drawn, unit=unit)


def _written(figure: float, *, of_bytes: bool) -> str:
    return format_bytes(int(figure)) if of_bytes else f"{figure * 1e3:.4g} ms"
