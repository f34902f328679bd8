"""Renders a plan as an HTML page: the table of policies, whose the memory is at the peak, and the step over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.charts import Mark, RowSeries, Run, Series, areas, rows
from lowtide.html import KINDS as KIND_COLOURS
from lowtide.html import TEMPLATES, render
from lowtide.planning.result import KINDS
from lowtide.units import format_seconds

if TYPE_CHECKING:
    from lowtide.planning.result import Candidate, Plan

_TEMPLATE = TEMPLATES / "plan.html"

_GIB = 2**30


def plan_page(plan: Plan) -> str:
    """Render the page as one file that needs no network. Needs the `html` extra."""
    return render(_TEMPLATE, plan=plan, code_for=code_for, bars=_bars(plan), timeline=_timeline(plan))


def code_for(candidate: Candidate) -> str:
    """Return the line of code that a user pastes."""
    return f'lowtide.apply(model, "{candidate.policy}")'


def _bars(plan: Plan) -> str:
    """Draw the peak memory of every policy, by owner, beside the budget."""
    candidates = plan.candidates
    kinds = [kind for kind in KIND_COLOURS if any(kind in candidate.estimate.owners for candidate in candidates)]
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for row, candidate in enumerate(candidates):
        begin = 0.0
        for kind in kinds:
            size = candidate.estimate.owners.get(kind, 0) / _GIB
            if size:
                title = f"{candidate.policy}: {KINDS.get(kind, kind)} {size:.2f} GiB"
                runs[kind].append(Run(row, begin, begin + size, title))
                begin += size
    series = [RowSeries(KINDS.get(kind, kind), KIND_COLOURS[kind], runs[kind]) for kind in kinds]
    labels = [_label(candidate.policy) for candidate in candidates]
    return rows("peaks", labels, series, axis="GiB at the peak", limit=plan.budget / _GIB)


def _label(policy: str) -> str:
    return policy if ";" not in policy else f"mixed: {policy.partition(';')[0]}, …"


def _timeline(plan: Plan) -> str | None:
    """Draw memory over the step, stacked by owner. Only a policy with all layers simulated has a timeline."""
    points = plan.timeline
    if not points:
        return None
    kinds = [kind for kind in KIND_COLOURS if any(kind in point["bytes"] for point in points)]
    bands = [
        Series(KINDS.get(kind, kind), KIND_COLOURS[kind], [point["bytes"].get(kind, 0) / _GIB for point in points])
        for kind in kinds
    ]
    titles = [
        f"{point['phase']}, {point['region'] or 'outside the regions'}, at {format_seconds(point['seconds'])}: "
        f"{sum(point['bytes'].values()) / _GIB:.2f} GiB"
        for point in points
    ]
    borders = [place for place in range(1, len(points)) if points[place]["phase"] != points[place - 1]["phase"]]
    return areas(
        "timeline",
        list(range(len(points))),
        bands,
        titles,
        unit="GiB",
        axis="allocations in order",
        marks=[Mark(place, points[place]["phase"]) for place in (0, *borders)],
        limit=plan.budget / _GIB,
        with_ticks=False,
    )
