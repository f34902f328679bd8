"""Renders a trace as an HTML page: memory over time by kind and by region, when each region ran, and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.html import KINDS as COLOURS
from lowtide.html import LEGEND, TEMPLATES, Band, chart, dashed, render, stacked, unit_for
from lowtide.tracing.result import KINDS, OUTSIDE

if TYPE_CHECKING:
    from lowtide.recording import Sample
    from lowtide.tracing.result import Trace

_TEMPLATE = TEMPLATES / "trace.html"
_PHASES = {"forward": "#0f9488", "recompute": "#2f7fc1", "backward": "#d97a1e"}
_MOST_ROWS = 80
"""The most regions whose runs are drawn; a model may have hundreds."""
_MOST_NAMES = 16
"""The most regions that a legend names; if there are more, names show under the pointer only."""
_LATE = 0.9
"""Past this part of the trace, a phase's name is written to the left of its border."""
_WORD = 0.1
"""The part of the width that a phase's name takes."""
_HOVER = "%{fullData.name}: %{y:.4~g} {unit}<br>%{customdata[0]}, %{customdata[1]}<extra></extra>"


def trace_page(trace: Trace) -> str:
    """Render the page as one file that needs no network. Needs the `html` extra."""
    return render(
        _TEMPLATE,
        trace=trace,
        peak=trace.peak,
        outside=OUTSIDE,
        regions=trace.by_region(),
        moved={
            direction: trace.moved_bytes(direction) for direction in dict.fromkeys(m.direction for m in trace.moves)
        },
        by_kind=_by_kind(trace),
        by_region=_by_region(trace),
        runs=_runs(trace),
        rows_left_out=max(0, len(trace.regions) - _MOST_ROWS),
    )


def _by_kind(trace: Trace) -> str:
    """Draw the stack of kinds, with what the allocator and the stores count beside it."""
    samples = trace.samples
    unit, factor = unit_for(max([trace.peak_bytes, *(level.allocated or 0 for level in trace.levels)]))
    bands = [
        Band(KINDS[kind], COLOURS[kind], [sample.nbytes.get(kind, 0) / factor for sample in samples])
        for kind in COLOURS
        if any(kind in sample.nbytes for sample in samples)
    ]
    data = [*_bands(bands, samples, unit), *_levels(trace, factor, unit)]
    return chart(data, _layout(trace, unit), name="kinds")


def _by_region(trace: Trace) -> str:
    """Draw activations by the region that made them."""
    samples = trace.samples_by_region
    unit, factor = unit_for(max((sum(sample.nbytes.values()) for sample in samples), default=0))
    names = [name for name in (*trace.regions, "") if any(name in sample.nbytes for sample in samples)]
    bands = [
        Band(name or OUTSIDE, _shade(place, len(names), name), [s.nbytes.get(name, 0) / factor for s in samples])
        for place, name in enumerate(names)
    ]
    layout = _layout(trace, unit) | {"showlegend": len(names) <= _MOST_NAMES}
    return chart(_bands(bands, samples, unit), layout, name="regions", with_script=False)


def _shade(place: int, count: int, name: str) -> str:
    """Return a colour from teal to violet in the model's order: neighbours look alike, first and last do not."""
    return f"hsl({175 + 120 * place / max(1, count):.0f}, 45%, {44 + 12 * (place % 2)}%)" if name else COLOURS["other"]


def _bands(bands: list[Band], samples: list[Sample], unit: str) -> list[dict[str, Any]]:
    hover = [[sample.moment.phase, sample.moment.region or OUTSIDE] for sample in samples]
    milliseconds = [sample.seconds * 1e3 for sample in samples]
    data = stacked(bands, milliseconds, hover, _HOVER.replace("{unit}", unit))
    return [series | {"line": {**series["line"], "shape": "hv"}} for series in data]


def _levels(trace: Trace, factor: int, unit: str) -> list[dict[str, Any]]:
    tiers = dict.fromkeys(tier for level in trace.levels for tier in level.stored)
    figures = {f"in the {tier} store": [level.stored.get(tier, 0) for level in trace.levels] for tier in tiers}
    if any(level.allocated is not None for level in trace.levels):
        figures["torch's allocator"] = [level.allocated or 0 for level in trace.levels]
    return [
        {
            "type": "scatter",
            "mode": "markers",  # read when the step moves on: nothing is known about the time in between
            "name": name,
            "x": [level.seconds * 1e3 for level in trace.levels],
            "y": [value / factor for value in values],
            "marker": {"size": 5, "color": colour, "line": {"width": 1, "color": "#ffffff"}},
            "hovertemplate": f"{name}: %{{y:.4~g}} {unit}<extra></extra>",
        }
        for (name, values), colour in zip(figures.items(), ("#c2517e", "#7a6fd0", "#d95c4a"), strict=False)
    ]


def _layout(trace: Trace, unit: str) -> dict[str, Any]:
    """Return the layout of a chart over time, with the phases' names where they begin."""
    borders = _borders(trace)
    return {
        "height": 420,
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "xaxis": _time_axis(trace),
        "legend": LEGEND | {"y": 1.08},
        "margin": {"l": 60, "r": 16, "t": 70, "b": 46},
        "shapes": [dashed({"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}, "#8796a5") for x, _ in borders],
        "annotations": _phase_names(borders, trace.spans[-1].end * 1e3 if trace.spans else 1.0),
    }


def _time_axis(trace: Trace) -> dict[str, Any]:
    end = trace.spans[-1].end * 1e3 if trace.spans else 1.0
    return {"title": {"text": "milliseconds on the host's clock"}, "range": [0, 1.01 * end]}


def _borders(trace: Trace) -> list[tuple[float, str]]:
    """Return when forward, backward and the optimizer begin; recomputations are a part of backward."""
    found: list[tuple[float, str]] = []
    before = ""
    for span in trace.spans:
        phase = "backward" if span.phase == "recompute" else span.phase
        if phase not in (before, "between"):
            found.append((span.begin * 1e3, phase))
            before = phase
    return found


def _phase_names(borders: list[tuple[float, str]], end: float) -> list[dict[str, Any]]:
    """Write the name of each phase over its beginning, where there is room."""
    names: list[dict[str, Any]] = []
    free = 0.0
    for x, phase in borders:
        is_late = x > _LATE * end
        if (x - _WORD * end if is_late else x) >= free:
            names.append(_phase_name(x, phase, is_late=is_late))
            free = x if is_late else x + _WORD * end
    return names


def _phase_name(x: float, phase: str, *, is_late: bool) -> dict[str, Any]:
    side = "right" if is_late else "left"
    place = {"yref": "paper", "y": 1, "xanchor": side, "yanchor": "bottom", "showarrow": False}
    return {"text": phase, "x": x, "font": {"size": 11}, **place}


def _runs(trace: Trace) -> str | None:
    """Draw one row for each region, with one bar for each run."""
    rows = trace.regions[:_MOST_ROWS]
    shown = set(rows)
    if not rows:
        return None
    data = []
    for phase, colour in _PHASES.items():
        spans = [span for span in trace.spans if span.phase == phase and span.region in shown]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": phase,
                "y": [span.region for span in spans],
                "x": [(span.end - span.begin) * 1e3 for span in spans],
                "base": [span.begin * 1e3 for span in spans],
                "marker": {"color": colour},
                "hovertemplate": f"%{{y}}: {phase}, %{{x:.3~g}} ms from %{{base:.4~g}} ms<extra></extra>",
            }
        )
    longest = max(map(len, rows))
    layout = {
        "barmode": "overlay",
        "height": 110 + 20 * len(rows),
        "margin": {"l": min(330, 30 + 7 * longest), "r": 16, "t": 40, "b": 46},
        "xaxis": _time_axis(trace),
        "yaxis": {"type": "category", "categoryarray": rows[::-1], "categoryorder": "array"},
        "legend": LEGEND,
    }
    return chart(data, layout, name="runs", with_script=False)
