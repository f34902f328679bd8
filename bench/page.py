"""Write docs/benchmark.md, docs/tiling-benchmark.md and the plots from the stored results: `python -m bench.page`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import charts, tiled_cases
from bench.ahead import MARGIN, ahead
from bench.comparing import BAND
from bench.section import NAMES, Bars, section, stored
from bench.tables import markdown, shown, table, transposed
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from bench.figures import Result

DOCS = Path(__file__).parent.parent / "docs"


def write() -> None:
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Return the text of every page and plot, by path."""
    results = {name: result for name in NAMES if (result := stored(name))}
    written = {DOCS / "benchmark.md": benchmark(results)}
    if "tiling" in results:
        written[DOCS / "tiling-benchmark.md"] = tiled(results["tiling"])
    for name, result in results.items():
        for plot in section(name).PLOTS:
            draw = charts.bars if isinstance(plot, Bars) else charts.lines
            written[DOCS / "img" / f"bench-{plot.name}.svg"] = draw(plot, result)
    return written


def benchmark(results: dict[str, Result]) -> str:
    return charts.render(
        "benchmark.md",
        band=f"{BAND:.0%}",
        margin=f"{MARGIN:.0%}",
        ahead={
            section(name).TITLE: ahead(section(name), result)
            for name, result in results.items()
            if section(name).RIVALRIES
        },
        parts=[part(name, result) for name, result in results.items()],
    )


def part(name: str, result: Result) -> dict[str, Any]:
    module = section(name)
    return {
        "title": module.TITLE,
        "about": filled(module.ABOUT.format(**_in_words(result.setting))),
        "plots": module.PLOTS,
        "table": markdown(table(module, result)),
        "left_out": result.left_out,
        "environment": in_one_line(result.environment),
    }


def filled(text: str) -> str:
    """Rewrap the paragraphs, whose lines changed length when values were filled in."""
    return "\n\n".join(textwrap.fill(paragraph, 118) for paragraph in text.split("\n\n"))


def _in_words(setting: dict[str, Any]) -> dict[str, Any]:
    """Return the setting with sizes in bytes written with their unit."""
    return {name: format_bytes(value) if name in ("boundary", "sums") else value for name, value in setting.items()}


def in_one_line(environment: dict[str, Any]) -> str:
    """Return one line about the versions and the machine that the figures come from."""
    if "versions" not in environment:
        loads = [f"{load} ({part})" for part, load in environment.get("load", {}).items()]
        return f"Load at the start: {', '.join(loads)}." if loads else ""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    machine = f"{environment['cpus']} x {environment['cpu']}, load {environment['load']} at the start"
    return f"Measured with {versions}; Python {environment['python']}; {machine}."


def tiled(result: Result) -> str:
    """Return the page of tiled MLPs: cases as rows, engines as columns."""
    cases = [*tiled_cases.CASES, *tiled_cases.DDP]
    figures = section("tiling").COLUMNS | {case: case for case in cases}
    lines = [[name, *(shown(row.get(figure)) for figure in figures)] for name, row in result.rows.items()]
    rows = transposed([["", *figures.values()], *lines])
    return charts.render("tiling-benchmark.md", accuracy=f"{tiled_cases.ACCURACY:g}", table=markdown(rows))


if __name__ == "__main__":
    write()
