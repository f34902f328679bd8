"""A report as an object, as text, as JSON and as a page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import InvalidValueError
from support.browser import needs_browser, show

if TYPE_CHECKING:
    from pathlib import Path


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(count)))


@pytest.fixture
def applied(sim: str) -> lowtide.Applied:
    model = blocks().to(sim)
    applied = lowtide.apply(model, "recompute+offload; 2: recompute")
    model(torch.randn(32, 64).to(sim)).square().mean().backward()
    applied.kept = model  # the handle does not keep it alive
    return applied


def test_without_a_format_it_is_data_that_prints(applied: lowtide.Applied):
    report = applied.report()
    assert applied.report("text") == str(report)
    assert json.loads(applied.report(format="json")) == json.loads(json.dumps(report.to_dict()))


@pytest.mark.parametrize("name", ["HTML", "xml", ""])
def test_an_unknown_format_is_refused(applied: lowtide.Applied, name: str):
    with pytest.raises(InvalidValueError, match=f"unknown report format '{name}': use one of text, json, html"):
        applied.report(name)


def test_the_page_has_every_region_with_its_policy(applied: lowtide.Applied):
    pytest.importorskip("plotly", reason="the html extra is not installed")
    page = applied.report(format="html")
    assert page == applied.report().to_html()
    for region in applied.report().regions:
        assert f'<td class="name">{region.name}</td>\n<td><code>{region.policy}</code></td>' in page
    assert "Host memory: 0 B now, 8 KiB at the peak." in page, "the first block's input; the second's stayed"


def test_a_page_of_a_policy_that_has_not_run(sim: str):
    pytest.importorskip("plotly", reason="the html extra is not installed")
    model = blocks()
    page = lowtide.apply(model, "recompute").report("html")
    assert "3 regions, 0 recomputes" in page
    assert 'id="boundary"' not in page, "no chart of nothing"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_report(applied: lowtide.Applied, tmp_path: Path, scheme: str):
    pytest.importorskip("plotly", reason="the html extra is not installed")
    probe = """return {
        rows: document.querySelectorAll("table.figures tbody tr").length,
        bars: document.querySelectorAll("#boundary .bars path").length,
        loaded: performance.getEntriesByType("resource").map(e => e.name),
      }"""
    shown = show(applied.report("html"), tmp_path, scheme=scheme, probe=probe)
    assert shown.answer == {"rows": 3, "bars": 6, "loaded": []}
    assert shown.console == []
    assert sum(shown.pixel(4, 4)) > 700 if scheme == "light" else sum(shown.pixel(4, 4)) < 100
