"""Pages that people open in a browser: one look for all of them, each in a single file that loads nothing.

`base.html` holds the look, in light and dark; a page's template extends it. Charts are plotly's, with its script inside
the page. The base also forbids the browser to fetch anything, so that a report shows the same on any machine.
"""

from __future__ import annotations

from lowtide.report_page.charts import chart
from lowtide.report_page.rendering import render
from lowtide.report_page.timelines import Band, stacked

__all__ = ["Band", "chart", "render", "stacked"]
