"""Figures as words, and results as tables: for the terminal and for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from bench.figures import Figure, Result
    from bench.section import Section


_UNITS = {
    "bytes": format_bytes,
    "s, virtual": lambda value: f"{value * 1e3:.3f} ms",
    "s": lambda value: f"{value:.1f} s",
    "share": lambda value: f"{value:.1%}",
    "FLOPs": lambda value: f"{value:.4g}",
}


def brief(figure: Figure) -> str:
    """The value alone."""
    if isinstance(figure.value, str):
        return figure.value
    if figure.unit in _UNITS:
        return _UNITS[figure.unit](figure.value)
    return f"{figure.value:.2f}" if figure.kind == "ratio" else f"{figure.value:g}"


def shown(figure: Figure | None) -> str:
    """A cell of a table: the value, and the quartiles of what has some. Nothing for a figure that a row lacks."""
    if figure is None:
        return ""
    spread = f" ({figure.low:.2f} to {figure.high:.2f})" if figure.low != figure.high else ""
    return brief(figure) + spread


def table(section: Section, result: Result) -> list[list[str]]:
    """The header, then a line for each row; columns that no row has are left out."""
    measured = {figure for row in result.rows.values() for figure in row}
    columns = {figure: title for figure, title in section.COLUMNS.items() if figure in measured}
    lines = [[name, *(shown(row.get(figure)) for figure in columns)] for name, row in result.rows.items()]
    return [["", *columns.values()], *lines]


def transposed(lines: list[list[str]]) -> list[list[str]]:
    return [list(line) for line in zip(*lines, strict=True)]


def markdown(lines: list[list[str]]) -> str:
    header, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rest])
