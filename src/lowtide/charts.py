"""Draws charts as SVG: bars, stacked bars in rows, and stacked areas over time.

A chart is a part of its page and needs no script. What is under the pointer is said by the browser (`<title>`). Text
and lines take their ink from the page's style sheet, so that one drawing fits light and dark; only series have colours.
"""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH = 1000
"""The width of a drawing in its own units. A page scales it to its own width."""
_RIGHT, _BELOW, _LINE = 16, 44, 20
_CHARACTER = 6.6
"""About the width of a character, at the size in which charts are written."""
_MOST_TICKS = 6


class Series(NamedTuple):
    """Figures with a name and a colour; `titles` says under the pointer what each is."""

    name: str
    colour: str
    values: Sequence[float]
    titles: Sequence[str] = ()


class Run(NamedTuple):
    """One bar in a row, from `begin` to `end`."""

    row: int
    begin: float
    end: float
    title: str


class RowSeries(NamedTuple):
    """Bars in rows that have a name and a colour in common."""

    name: str
    colour: str
    runs: Sequence[Run]


class Mark(NamedTuple):
    """A place on the horizontal axis with a word over it, from which a dashed line goes down."""

    at: float
    text: str


class Dots(NamedTuple):
    """Single readings: nothing is known about the time in between."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    titles: Sequence[str]


class Scale(NamedTuple):
    """What several charts have in common, so that they can be compared: their greatest value, and the most places."""

    most: float
    places: int
    height: int


def columns(
    name: str,
    places: Sequence[str],
    series: Sequence[Series],
    *,
    unit: str,
    is_stacked: bool = False,
    scale: Scale | None = None,
) -> str:
    """Draw a group of columns for each place, side by side or on top of each other."""
    tallest = max(sum(at) if is_stacked else max(at) for at in zip(*(one.values for one in series), strict=True))
    scale = scale or Scale(tallest, len(places), 260)
    legend = [(one.name, one.colour) for one in series]
    plot = _Plot(name, scale.height, legend, left=64, most_y=scale.most)
    plot.horizontal_lines(unit)
    step = plot.width / scale.places
    wide = 0.7 * step if is_stacked else 0.7 * step / len(series)
    below = [0.0] * len(places)
    for number, one in enumerate(series):
        for place, value in enumerate(one.values):
            left = plot.left + (place + 0.15) * step + (0 if is_stacked else number * wide)
            plot.box(left, plot.y(below[place] + value), wide, plot.y(0) - plot.y(value), one.colour, one.titles[place])
            below[place] += value if is_stacked else 0
    for place in _spread(places, step):
        plot.text(plot.left + (place + 0.5) * step, plot.bottom + 16, places[place], anchor="middle")
    return plot.drawn()


def rows(
    name: str, labels: Sequence[str], series: Sequence[RowSeries], *, axis: str, height: int = 30, limit: float = 0.0
) -> str:
    """Draw bars in rows, one for each label, from the top to the bottom. A `limit` is a dashed line."""
    end = max([limit, *(run.end for one in series for run in one.runs)])
    left = min(330, 24 + int(_CHARACTER * max(map(len, labels), default=0)))
    legend = [(one.name, one.colour) for one in series]
    plot = _Plot(name, height * len(labels), legend, left=left, most_x=end)
    plot.vertical_lines(axis)
    for one in series:
        for run in one.runs:
            top = plot.top + height * (run.row + 0.15)
            plot.box(plot.x(run.begin), top, plot.x(run.end) - plot.x(run.begin), 0.7 * height, one.colour, run.title)
    for row, label in enumerate(labels):
        plot.text(left - 8, plot.top + height * (row + 0.5) + 4, _cut(label, left - 12), anchor="end", title=label)
    if limit:
        plot.dashed(plot.x(limit), plot.top, plot.x(limit), plot.bottom, "limit")
    return plot.drawn()


def areas(
    name: str,
    x: Sequence[float],
    bands: Sequence[Series],
    titles: Sequence[str],
    *,
    unit: str,
    axis: str,
    marks: Sequence[Mark] = (),
    dots: Sequence[Dots] = (),
    limit: float = 0.0,
    with_ticks: bool = True,
    with_legend: bool = True,
) -> str:
    """Draw bands on top of each other over `x`, each value from its place to the next.

    `titles` says under the pointer what each place is. Marks divide the axis, dots are drawn above all.
    """
    heights = [sum(at) for at in zip(*(band.values for band in bands), strict=True)] or [0.0]
    most = max([limit, *heights, *(value for one in dots for value in one.y)])
    legend = [(one.name, one.colour) for one in bands] + [(one.name, one.colour) for one in dots]
    shown = legend if with_legend else []
    end = max([*x, *(mark.at for mark in marks)], default=0) + (not with_ticks)  # places in order: the last is as wide
    plot = _Plot(name, 340, shown, left=64, most_x=end, most_y=most)
    plot.horizontal_lines(unit)
    if with_ticks:
        plot.vertical_lines(axis)
    else:
        plot.text((plot.left + plot.right) / 2, plot.bottom + 36, axis, anchor="middle")
    below = [0.0] * len(x)
    for band in bands:
        above = [low + value for low, value in zip(below, band.values, strict=True)]
        outline = [*plot.steps(x, above), *reversed(plot.steps(x, below))]
        plot.add(f'<path class="band" d="M{" L".join(outline)} Z" fill="{band.colour}">{_title(band.name)}</path>')
        below = above
    edges = [*map(plot.x, x), plot.right]
    for place, title in enumerate(titles):
        plot.box(edges[place], plot.top, edges[place + 1] - edges[place], plot.height, "transparent", title, "strip")
    for one in dots:
        for at, value, title in zip(one.x, one.y, one.titles, strict=True):
            plot.add(f'<circle cx="{plot.x(at):.1f}" cy="{plot.y(value):.1f}" r="3" fill="{one.colour}" ')
            plot.add(f'class="dot">{_title(title)}</circle>')
    for mark in marks:
        plot.dashed(plot.x(mark.at), plot.top, plot.x(mark.at), plot.bottom, "mark")
    plot.words(marks)
    if limit:
        plot.dashed(plot.left, plot.y(limit), plot.right, plot.y(limit), "limit")
    return plot.drawn()


class _Plot:
    """One drawing: the legend on top, the plotting area with its scales, and what is drawn into it."""

    def __init__(
        self,
        name: str,
        height: float,
        legend: Sequence[tuple[str, str]],
        *,
        left: float,
        most_x: float = 0.0,
        most_y: float = 0.0,
    ) -> None:
        self._name = name
        self._parts: list[str] = []
        self._most = (most_x or 1.0, most_y or 1.0)
        self.left, self.right, self.height = left, WIDTH - _RIGHT, height
        self.top = self._legend(legend) + 26.0
        self.bottom = self.top + height

    @property
    def width(self) -> float:
        return self.right - self.left

    def x(self, value: float) -> float:
        """Return where a value is on the horizontal axis."""
        return self.left + self.width * value / self._most[0]

    def y(self, value: float) -> float:
        """Return where a value is on the vertical axis, which begins at 0."""
        return self.bottom - self.height * value / (1.05 * self._most[1])

    def steps(self, x: Sequence[float], values: Sequence[float]) -> list[str]:
        """Return the corners of a line that keeps each value until the next one."""
        edges = [*map(self.x, x), self.right]
        return [
            f"{edges[place + side]:.1f} {self.y(value):.1f}" for place, value in enumerate(values) for side in (0, 1)
        ]

    def add(self, part: str) -> None:
        self._parts.append(part)

    def box(self, x: float, y: float, width: float, height: float, colour: str, title: str, kind: str = "bar") -> None:
        """Draw a rectangle. One of no size is drawn, too: it still has a title."""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
        self.add(f'<rect class="{kind}" {size} fill="{colour}">{_title(title)}</rect>')

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", title: str = "") -> None:
        """Write a word; its `title` is the whole of it, where it is cut."""
        whole = _title(title) if title and title != text else ""
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}{whole}</text>')

    def dashed(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        """Draw a dashed line across the plot, for a limit or a border."""
        self.add(f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>')

    def words(self, marks: Sequence[Mark]) -> None:
        """Write the words of marks over their places, where there is room; at the right edge, to the left of them."""
        free = 0.0
        for mark in marks:
            at, width = self.x(mark.at), _CHARACTER * len(mark.text) + 8
            is_late = at + width > self.right
            if (at - width if is_late else at) >= free:
                self.text(at, self.top - 6, mark.text, anchor="end" if is_late else "start")
                free = at if is_late else at + width

    def horizontal_lines(self, unit: str) -> None:
        """Draw the scale on the left side."""
        for value in _ticks(self._most[1]):
            self.add(f'<line class="grid" x1="{self.left}" y1="{self.y(value):.1f}" ')
            self.add(f'x2="{self.right}" y2="{self.y(value):.1f}"/>')
            self.text(self.left - 8, self.y(value) + 4, f"{value:g}", anchor="end")
        self.text(self.left - 8, self.top - 8, unit, anchor="end")

    def vertical_lines(self, axis: str) -> None:
        """Draw the scale along the bottom."""
        for value in _ticks(self._most[0]):
            self.add(f'<line class="grid" x1="{self.x(value):.1f}" y1="{self.top:.1f}" ')
            self.add(f'x2="{self.x(value):.1f}" y2="{self.bottom:.1f}"/>')
            self.text(self.x(value), self.bottom + 16, f"{value:g}", anchor="middle")
        self.text((self.left + self.right) / 2, self.bottom + 36, axis, anchor="middle")

    def drawn(self) -> str:
        """Return the drawing as HTML."""
        size = f'viewBox="0 0 {WIDTH} {self.bottom + _BELOW:.0f}"'
        return f'<svg class="chart" id="{self._name}" role="img" {size}>{"".join(self._parts)}</svg>'

    def _legend(self, entries: Iterable[tuple[str, str]]) -> float:
        """Write the legend in as many lines as it needs, and return where it ends."""
        x, y = 0.0, 0.0
        for name, colour in entries:
            width = 24 + _CHARACTER * len(name) + 14
            if x and x + width > WIDTH:
                x, y = 0.0, y + _LINE
            self.add(f'<rect x="{x:.1f}" y="{y + 4:.1f}" width="12" height="12" fill="{colour}"/>')
            self.add(f'<text class="legend" x="{x + 18:.1f}" y="{y + 14:.1f}">{html.escape(name)}</text>')
            x += width
        return y + _LINE


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _cut(label: str, width: float) -> str:
    most = max(1, round(width / _CHARACTER))
    return label if len(label) <= most else f"{label[: most - 1]}…"


def _spread(labels: Sequence[str], step: float) -> range:
    """Return which of the labels are written: as many as there is room for, at equal distances."""
    return range(0, len(labels), max(1, math.ceil(_CHARACTER * (max(map(len, labels)) + 1) / step)))


def _ticks(most: float) -> list[float]:
    """Return round values from 0 up to `most`."""
    rough = most / _MOST_TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [round(step * number, 12) for number in range(int(most / step + 1e-9) + 1)]
