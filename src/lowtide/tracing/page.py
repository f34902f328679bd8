"""Renders a trace as an HTML page: memory over time by kind and by region, when each region ran, and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.charts import Dots, Mark, RowSeries, Run, Series, areas, rows
from lowtide.html import KINDS as COLOURS
from lowtide.html import TEMPLATES, render, unit_for
from lowtide.tracing.result import KINDS, OUTSIDE
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lowtide.recording import Sample
    from lowtide.tracing.phases import Span
    from lowtide.tracing.result import Trace

_TEMPLATE = TEMPLATES / "trace.html"
_PHASES = {"forward": "#0f9488", "recompute": "#2f7fc1", "backward": "#d97a1e"}
_MOST_ROWS = 80
"""The most regions whose runs are drawn; a model may have hundreds."""
_MOST_NAMES = 16
"""The most regions that a legend names; if there are more, names show under the pointer only."""
_MOST_HELD = 6
"""How many owners of memory are named under the pointer."""
_CLOCK = "milliseconds on the host's clock"


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
        Series(KINDS[kind], COLOURS[kind], [sample.nbytes.get(kind, 0) / factor for sample in samples])
        for kind in COLOURS
        if any(kind in sample.nbytes for sample in samples)
    ]
    return _over_time("kinds", trace, samples, bands, unit, dots=_levels(trace, factor))


def _by_region(trace: Trace) -> str:
    """Draw activations by the region that made them."""
    samples = trace.samples_by_region
    unit, factor = unit_for(max((sum(sample.nbytes.values()) for sample in samples), default=0))
    names = [name for name in (*trace.regions, "") if any(name in sample.nbytes for sample in samples)]
    bands = [
        Series(name or OUTSIDE, _shade(place, len(names), name), [s.nbytes.get(name, 0) / factor for s in samples])
        for place, name in enumerate(names)
    ]
    return _over_time("regions", trace, samples, bands, unit, with_legend=len(names) <= _MOST_NAMES)


def _over_time(
    name: str,
    trace: Trace,
    samples: list[Sample],
    bands: list[Series],
    unit: str,
    *,
    dots: Sequence[Dots] = (),
    with_legend: bool = True,
) -> str:
    titles = [
        f"{sample.moment.phase}, {sample.moment.region or OUTSIDE}: {format_bytes(sum(sample.nbytes.values()))}\n"
        + "\n".join(_largest(sample))
        for sample in samples
    ]
    return areas(
        name,
        [sample.seconds * 1e3 for sample in samples],
        bands,
        titles,
        unit=unit,
        axis=_CLOCK,
        marks=_borders(trace),
        dots=dots,
        with_legend=with_legend,
    )


def _largest(sample: Sample) -> list[str]:
    """Name what holds most at one moment."""
    held = sorted(sample.nbytes.items(), key=lambda pair: -pair[1])[:_MOST_HELD]
    return [f"{KINDS.get(owner, owner) or OUTSIDE} {format_bytes(size)}" for owner, size in held if size]


def _shade(place: int, count: int, name: str) -> str:
    """Return a colour from teal to violet in the model's order: neighbours look alike, first and last do not."""
    return f"hsl({175 + 120 * place / max(1, count):.0f}, 45%, {44 + 12 * (place % 2)}%)" if name else COLOURS["other"]


def _levels(trace: Trace, factor: int) -> list[Dots]:
    """Return what the allocator and the stores counted. It is read when the step moves on."""
    tiers = dict.fromkeys(tier for level in trace.levels for tier in level.stored)
    figures = {f"in the {tier} store": [level.stored.get(tier, 0) for level in trace.levels] for tier in tiers}
    if any(level.allocated is not None for level in trace.levels):
        figures["torch's allocator"] = [level.allocated or 0 for level in trace.levels]
    milliseconds = [level.seconds * 1e3 for level in trace.levels]
    return [
        Dots(
            name,
            colour,
            milliseconds,
            [value / factor for value in values],
            [f"{name}: {format_bytes(value)}" for value in values],
        )
        for (name, values), colour in zip(figures.items(), ("#c2517e", "#7a6fd0", "#d95c4a"), strict=False)
    ]


def _borders(trace: Trace) -> list[Mark]:
    """Return when forward, backward and the optimizer begin; recomputations are a part of backward."""
    found: list[Mark] = []
    before = ""
    for span in trace.spans:
        phase = "backward" if span.phase == "recompute" else span.phase
        if phase not in (before, "between"):
            found.append(Mark(span.begin * 1e3, phase))
            before = phase
    return found


def _runs(trace: Trace) -> str | None:
    """Draw one row for each region, with one bar for each run."""
    labels = trace.regions[:_MOST_ROWS]
    if not labels:
        return None
    place = {name: row for row, name in enumerate(labels)}
    series = [
        RowSeries(
            phase,
            colour,
            [
                Run(place[span.region], span.begin * 1e3, span.end * 1e3, f"{span.region}: {phase}, {_duration(span)}")
                for span in trace.spans
                if span.phase == phase and span.region in place
            ],
        )
        for phase, colour in _PHASES.items()
    ]
    return rows("runs", labels, series, axis=_CLOCK, height=20)


def _duration(span: Span) -> str:
    return f"{format_seconds(span.end - span.begin)} from {format_seconds(span.begin)}"
