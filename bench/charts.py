"""Plots as SVG, from templates. They have no background, and colours that are seen well on white and on near-black."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from bench.figures import FINE
from bench.tables import brief

if TYPE_CHECKING:
    from bench.figures import Figure, Result
    from bench.section import Bars, Lines

OURS, OTHERS = "#0f9488", "#8796a5"
LINE_COLOURS = ("#0f9488", "#8796a5", "#d97a1e", "#7a6fd0", "#c2517e", "#4a90c2")
TEMPLATES = Path(__file__).parent / "templates"
BAR_WIDTH, ROW_HEIGHT = 300, 26
PLOT = {"left": 60, "right": 460, "top": 50, "bottom": 250}


def render(template: str, **data: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["svg"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**data)


def is_ours(row: str) -> bool:
    return row.lower().startswith("lowtide")


def bars(plot: Bars, result: Result) -> str:
    """A bar for each row that has the figure."""
    figures = {name: row[plot.figure] for name, row in result.rows.items() if plot.figure in row}
    longest = max(figure.value for figure in figures.values())
    drawn = [
        {
            "name": name,
            "top": 40 + ROW_HEIGHT * place,
            "width": f"{BAR_WIDTH * figure.value / longest:.1f}",
            "text_at": f"{BAR_WIDTH * figure.value / longest + 296:.1f}",
            "colour": OURS if is_ours(name) else OTHERS,
            "text": brief(figure) + _fault(result.rows[name].get(plot.verdict)),
        }
        for place, (name, figure) in enumerate(figures.items())
    ]
    return render("bars.svg", plot=plot, bars=drawn, height=52 + ROW_HEIGHT * len(drawn))


def _fault(verdict: Figure | None) -> str:
    return "" if verdict is None or verdict.value in FINE else f" ({verdict.value})"


def lines(plot: Lines, result: Result) -> str:
    """A line for each row. The first is drawn last and thinnest: those that coincide are all seen."""
    base = result.rows.get(plot.against)
    least = 0 if base is None else 1
    series = {
        name: [result.rows[name][figure].value / (1 if base is None else base[figure].value) for figure in plot.figures]
        for name in plot.rows
        if name in result.rows
    }
    most = max(value for values in series.values() for value in values)
    drawn = [
        {
            "name": name,
            "colour": LINE_COLOURS[place],
            "width": 2 + place,
            "points": [(_x(step, len(plot.figures)), _y(value, least, most)) for step, value in enumerate(series[row])],
            "legend": 60 + 22 * place,
        }
        for place, (row, name) in enumerate(zip(series, _short(list(series)), strict=True))
    ]
    labels = "{:.1f}" if least else "{:g}"
    ticks = [{"text": labels.format(value), "y": _y(value, least, most)} for value in _ticks(least, most)]
    steps = [{"text": text, "x": _x(step, len(plot.figures))} for step, text in enumerate(plot.figures.values())]
    return render("lines.svg", plot=plot, series=drawn[::-1], ticks=ticks, steps=steps, frame=PLOT)


def _short(rows: list[str]) -> list[str]:
    """Names for the legend: without ours, if all are ours."""
    return [row.removeprefix("Lowtide ") for row in rows] if all(map(is_ours, rows)) else rows


def _ticks(least: int, most: float) -> list[float]:
    """As many as can be told apart."""
    step = next(step for step in (0.2, 0.5, 1, 2, 5, 10, 20) if (most - least) / step < 8)  # noqa: PLR2004
    return [least + step * number for number in range(int((most - least) / step) + 1)]


def _x(step: int, steps: int) -> str:
    return f"{PLOT['left'] + (PLOT['right'] - PLOT['left']) * step / (steps - 1):.1f}"


def _y(value: float, least: int, most: float) -> str:
    return f"{PLOT['bottom'] - (PLOT['bottom'] - PLOT['top']) * (value - least) / (most - least):.1f}"
