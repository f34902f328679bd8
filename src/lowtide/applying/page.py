"""What a policy did, as a page: bytes by region, the counts, the tiles and the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.report_page import chart, render
from lowtide.report_page.charts import KINDS as COLOURS
from lowtide.report_page.charts import LEGEND, unit_for

if TYPE_CHECKING:
    from lowtide.applying.report import Report

_TEMPLATE = Path(__file__).parent / "templates" / "applied.html"
_SERIES = {
    "kept_bytes": ("kept on the device", COLOURS["saved"]),
    "packed_bytes": ("moved to the store", COLOURS["restored"]),
}


def as_page(report: Report) -> str:
    """One file that needs no network. Needs the `html` extra."""
    return render(
        _TEMPLATE,
        report=report,
        figures=report.figures(),
        declined=sum(region.declined_bytes for region in report.regions),
        bars=_bars(report),
    )


def _bars(report: Report) -> str | None:
    """What each region saved at its boundary so far: kept, and moved. None if nothing was saved there."""
    most = max((region.kept_bytes + region.packed_bytes for region in report.regions), default=0)
    if not most:
        return None
    unit, factor = unit_for(most)
    names = [region.name for region in report.regions]
    data = [
        {
            "type": "bar",
            "name": label,
            "x": names,
            "y": [getattr(region, figure) / factor for region in report.regions],
            "marker": {"color": colour},
            "hovertemplate": f"%{{x}}<br>{label} %{{y:.4~g}} {unit}<extra></extra>",
        }
        for figure, (label, colour) in _SERIES.items()
    ]
    layout = {
        "barmode": "stack",
        "height": 320,
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "margin": {"l": 60, "r": 16, "t": 40, "b": 40},
        "legend": LEGEND,
        "showlegend": True,
    }
    return chart(data, layout, name="boundary")
