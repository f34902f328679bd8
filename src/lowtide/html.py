"""Renders HTML pages: Jinja templates with one look, and charts (`charts`) in them.

Jinja belongs to the `html` extra and is imported when a page is made. Everything that a template is given is escaped,
and a name that it lacks is an error.
"""

from __future__ import annotations

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
