"""Memory over a step, stacked: one drawing for steps that were simulated and for steps that ran."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Band:
    """One layer of the stack: a figure for each point of time."""

    name: str
    colour: str
    values: list[float]


def stacked(bands: list[Band], x: list[float], hover: list[list[str]], template: str) -> list[dict[str, Any]]:
    """The bands from the bottom to the top, as plotly's data. `template` shows what `hover` says about a point."""
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "memory",
            "name": band.name,
            "x": x,
            "y": band.values,
            "line": {"width": 0.5, "color": band.colour},
            "fillcolor": band.colour,  # else plotly makes it pale, and the same thing has another colour in bars
            "customdata": hover,
            "hovertemplate": template,
        }
        for band in bands
    ]
