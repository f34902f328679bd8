"""Plotly's charts inside a page.

A chart has no background and no colour of text or lines of its own: the page's style sets them, so that one drawing
fits light and dark, also if that changes while the page is open.
"""

from __future__ import annotations

from typing import Any

from lowtide.report_page.extra import load

COLOURS = ("#8796a5", "#0f9488", "#d97a1e", "#7a6fd0", "#c2517e")
"""Of a chart's series, the first for what others are compared with; seen well on white and on near-black."""

_LAYOUT = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "margin": {"l": 60, "r": 16, "t": 40, "b": 40},
    "colorway": COLOURS,
    "hovermode": "closest",
    "hoverlabel": {"bgcolor": "#1c2630", "bordercolor": "#8796a5", "font": {"color": "#ffffff"}},
}


def chart(data: list[dict[str, Any]], layout: dict[str, Any], *, name: str, with_script: bool = True) -> str:
    """A chart as HTML. The page's first one brings plotly's script (`with_script`), which is 5 MB."""
    figure = {"data": data, "layout": {"template": "none", **_LAYOUT, **layout}}
    drawn: str = load("plotly.io").to_html(
        figure,
        config={"displayModeBar": False, "responsive": True},
        include_plotlyjs=with_script,
        include_mathjax=False,
        full_html=False,
        div_id=name,
    )
    return drawn
