"""Renders a plan as an HTML page: the table of policies, whose the memory is at the peak, and the step over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.html import KINDS as KIND_COLOURS
from lowtide.html import LEGEND, TEMPLATES, Band, chart, dashed, render, stacked
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
    candidates = plan.candidates[::-1]
    names = [_label(candidate.policy) for candidate in candidates]
    kinds = [kind for kind in KIND_COLOURS if any(kind in candidate.estimate.owners for candidate in candidates)]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": KINDS.get(kind, kind),
            "y": names,
            "x": [candidate.estimate.owners.get(kind, 0) / _GIB for candidate in candidates],
            "marker": {"color": KIND_COLOURS[kind]},
            "hovertemplate": f"%{{y}}<br>{KINDS.get(kind, kind)} %{{x:.2f}} GiB<extra></extra>",
        }
        for kind in kinds
    ]
    layout = {
        "barmode": "stack",
        "height": 140 + 34 * len(names),
        "margin": {"l": 330, "r": 16, "t": 40, "b": 50},
        "xaxis": {"title": {"text": "GiB at the peak"}},
        "shapes": [dashed({"x0": plan.budget / _GIB, "x1": plan.budget / _GIB, "yref": "paper", "y0": 0, "y1": 1})],
        "legend": LEGEND,
    }
    return chart(data, layout, name="peaks")


def _label(policy: str) -> str:
    return policy if ";" not in policy else f"mixed: {policy.partition(';')[0]}, …"


def _timeline(plan: Plan) -> str | None:
    """Draw memory over the step, stacked by owner. Only a policy with all layers simulated has a timeline."""
    points = plan.timeline
    if not points:
        return None
    kinds = [kind for kind in KIND_COLOURS if any(kind in point["bytes"] for point in points)]
    bands = [
        Band(KINDS.get(kind, kind), KIND_COLOURS[kind], [point["bytes"].get(kind, 0) / _GIB for point in points])
        for kind in kinds
    ]
    hover = [
        [point["phase"], point["region"] or "outside the regions", format_seconds(point["seconds"])] for point in points
    ]
    template = "%{customdata[0]}, %{customdata[1]}<br>at %{customdata[2]}: %{y:.2f} GiB"
    data = stacked(bands, list(range(len(points))), hover, template)
    borders = [place for place in range(1, len(points)) if points[place]["phase"] != points[place - 1]["phase"]]
    layout = {
        "height": 420,
        "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        "xaxis": {
            "tickvals": [0, *borders],
            "ticktext": [points[place]["phase"] for place in (0, *borders)],
            "ticklabelposition": "outside right",  # where the phase is, and clear of the other axis
            "title": {"text": "allocations in order"},
        },
        "hovermode": "x unified",
        "shapes": [dashed({"y0": plan.budget / _GIB, "y1": plan.budget / _GIB, "xref": "paper", "x0": 0, "x1": 1})],
        "legend": LEGEND,
    }
    return chart(data, layout, name="timeline", with_script=False)  # the first chart brought it
