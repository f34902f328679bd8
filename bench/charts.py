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
    """Ratios to the plain row. The first line is drawn last and thinnest: those that coincide are all seen."""
    plain = result.rows["plain"]
    series = {
        name: [result.rows[name][figure].value / plain[figure].value for figure in plot.figures]
        for name in plot.rows
        if name in result.rows
    }
    most = max(value for values in series.values() for value in values)
    drawn = [
        {
            "name": name,
            "colour": LINE_COLOURS[place],
            "width": 2 + place,
            "points": [_point(step, value, most, len(plot.figures)) for step, value in enumerate(values)],
            "legend": 60 + 22 * place,
        }
        for place, (name, values) in enumerate(series.items())
    ]
    ticks = [{"text": f"{value:.1f}", "y": _y(value, most)} for value in _ticks(most)]
    steps = [{"text": text, "x": _x(step, len(plot.figures))} for step, text in enumerate(plot.figures.values())]
    return render("lines.svg", plot=plot, series=drawn[::-1], ticks=ticks, steps=steps, frame=PLOT)


def _ticks(most: float) -> list[float]:
    step = 0.2 if most < 2.5 else 0.5  # noqa: PLR2004  (as many lines as can be told apart)
    return [1 + step * number for number in range(int((most - 1) / step) + 1)]


def _point(step: int, value: float, most: float, steps: int) -> tuple[str, str]:
    return _x(step, steps), _y(value, most)


def _x(step: int, steps: int) -> str:
    return f"{PLOT['left'] + (PLOT['right'] - PLOT['left']) * step / (steps - 1):.1f}"


def _y(value: float, most: float) -> str:
    return f"{PLOT['bottom'] - (PLOT['bottom'] - PLOT['top']) * (value - 1) / (most - 1):.1f}"
