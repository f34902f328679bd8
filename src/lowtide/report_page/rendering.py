"""Templates become pages. Everything that a template is given is escaped, and a name that it lacks is an error."""

from __future__ import annotations

from pathlib import Path

from lowtide.report_page.extra import load
from lowtide.units import format_bytes

_SHARED = Path(__file__).parent / "templates"


def render(template: Path, **data: object) -> str:
    """The page of a template, which may extend `base.html` and import `parts.html`."""
    jinja2 = load("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, _SHARED]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = format_bytes
    page: str = environment.get_template(template.name).render(**data)
    return page
