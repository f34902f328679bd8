"""Renders HTML pages: Jinja templates with one look, and Plotly's charts in them.

Both packages belong to the `html` extra and are imported when a page is made. Everything that a template is given is
escaped, and a name that it lacks is an error.

A chart has no background, and sets no colour of text or lines: the page's style sheet does, so that one drawing fits
light and dark, even if the scheme changes while the page is open. Memory over a step is drawn by one function
(`stacked`), for steps that were simulated and for steps that ran.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from lowtide.errors import MissingDependencyError
from lowtide.units import format_bytes, format_seconds

TEMPLATES = Path(__file__).parent / "templates"

COLOURS = ("#8796a5", "#0f9488", "#d97a1e", "#7a6fd0", "#c2517e")
"""The colours of a chart's series, the first for the reference. All can be seen on white and on near-black."""

KINDS = {
    "weights": "#5b6b7a",
    "optimizer": "#8796a5",
    "batch": "#a9a53a",
    "gradients": "#b0732c",
    "activations": "#0f9488",
    "saved": "#0f9488",
    "recomputed": "#2f7fc1",
    "restored": "#a45fb8",
    "working": "#4cb5ab",
    "logits": "#d97a1e",
    "workspace": "#c2517e",
    "communication": "#7a6fd0",
    "other": "#b3a79b",
}
"""The colours of kinds of bytes, the same in every chart, in the order of a stack from its bottom to its top."""

LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
"""A legend in a line above the chart."""

_LAYOUT = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "margin": {"l": 60, "r": 16, "t": 40, "b": 40},
    "colorway": COLOURS,
    "hovermode": "closest",
    "hoverlabel": {"bgcolor": "#1c2630", "bordercolor": "#8796a5", "font": {"color": "#ffffff"}},
}

_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def render(template: Path, **data: object) -> str:
    """Render a template, which may extend `base.html` and import `parts.html`."""
    jinja2 = _import_extra("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = format_bytes
    environment.filters["seconds"] = format_seconds
    page: str = environment.get_template(template.name).render(**data)
    return page


def chart(data: list[dict[str, Any]], layout: dict[str, Any], *, name: str, with_script: bool = True) -> str:
    """Draw a chart as HTML. A page's first chart includes Plotly's script (`with_script`), which is 5 MB."""
    figure = {"data": data, "layout": {"template": "none", **_LAYOUT, **layout}}
    drawn: str = _import_extra("plotly.io").to_html(
        figure,
        config={"displayModeBar": False, "responsive": True},
        include_plotlyjs=with_script,
        include_mathjax=False,
        full_html=False,
        div_id=name,
    )
    return drawn


@dataclasses.dataclass(frozen=True)
class Band:
    """One layer of a stacked chart: a figure for each point of time."""

    name: str
    colour: str
    values: list[float]


def stacked(bands: list[Band], x: list[float], hover: list[list[str]], template: str) -> list[dict[str, Any]]:
    """Return bands, from the bottom to the top, as Plotly's data. `template` shows what `hover` says about a point."""
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "memory",
            "name": band.name,
            "x": x,
            "y": band.values,
            "line": {"width": 0.5, "color": band.colour},
            "fillcolor": band.colour,  # else Plotly makes it pale, and the same kind has a different colour in bars
            "customdata": hover,
            "hovertemplate": template,
        }
        for band in bands
    ]


def dashed(where: dict[str, Any], colour: str = "#c0392b") -> dict[str, Any]:
    """Return a dashed line across a chart, for a limit or a border."""
    return {"type": "line", "line": {"dash": "dash", "width": 1.5, "color": colour}, **where}


def unit_for(largest: float) -> tuple[str, int]:
    """Return the unit in which the largest figure of a chart is written, and how many bytes that unit is."""
    unit = format_bytes(largest).split()[1]
    return unit, _UNITS[unit]


def _import_extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f"an HTML page needs {package}, which cannot be imported here ({error}): pip install lowtide[html]"
        ) from error
