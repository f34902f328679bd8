"""The plan as a page, also in a browser, in light and dark."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from lowtide.planning.page import code_for
from lowtide.targets.job import Job
from support.browser import needs_browser, show
from support.sample_plans import GIB, make_plan

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("jinja2", reason="the html extra is not installed")


def test_the_page_has_the_table_the_line_and_the_reasons():
    plan = make_plan(20 * GIB)
    page = plan.to_html()
    assert "lowtide.apply(model, &#34;recompute; *.0: none&#34;)" in page
    assert "10.49 GiB too much" in page
    assert "layers.&lt;3&gt;" in page, "names are escaped"
    assert "1 x 4096 tokens, fp32, adamw" in page, "the type of the weights that were planned"
    assert code_for(plan.best) == 'lowtide.apply(model, "recompute; *.0: none")'


def test_what_is_trained_and_long_steps_are_said_as_people_do():
    job = Job(tokens=4096, lora=16, base="4bit")
    plan = dataclasses.replace(make_plan(20 * GIB), job=job)
    assert "LoRA 16 (fp32) in all projections on a 4-bit base, 1 x 4096 tokens" in str(plan)
    slow = dataclasses.replace(plan.best, estimate=dataclasses.replace(plan.best.estimate, seconds=1230.0))
    plan = dataclasses.replace(plan, candidates=[plan.candidates[0], slow], best=slow, fastest=slow)
    for text in (str(plan), plan.to_html()):
        assert "20.5 min" in text
        assert "1.23e+03" not in text


def test_a_plan_in_which_nothing_fits_says_so():
    plan = make_plan(4 * GIB)
    assert "does not fit" in plan.to_html()
    assert not plan.recommended
    assert "nothing fits" in str(plan)


def test_how_ranks_share_the_step_is_said_everywhere():
    job = Job(tokens=4096, engine="fsdp2", ranks=8, tp=2, optimizer_in_backward=True)
    plan = dataclasses.replace(make_plan(20 * GIB), job=job)
    assert f"8 x {plan.accelerator.name} (fsdp2, tp 2)" in str(plan)
    assert f"8 x {plan.accelerator.name} (fsdp2, tp 2)" in plan.to_html()
    assert "adamw in backward" in plan.to_html()


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_both_charts(tmp_path: Path, scheme: str):
    probe = """return {
        rows: document.querySelectorAll("table.figures tbody tr").length,
        best: document.querySelectorAll("tr.best").length,
        bars: document.querySelectorAll("#peaks .bar").length,
        areas: document.querySelectorAll("#timeline .band").length,
        loaded: performance.getEntriesByType("resource").map(e => e.name),
      }"""
    shown = show(make_plan(20 * GIB).to_html(), tmp_path, scheme=scheme, probe=probe)
    assert shown.answer["rows"] == 2
    assert shown.answer["best"] == 1
    assert shown.answer["bars"] == 4, "two policies, two kinds of owners"
    assert shown.answer["areas"] == 2
    assert shown.answer["loaded"] == []
    assert shown.console == []
    assert sum(shown.pixel(4, 4)) > 700 if scheme == "light" else sum(shown.pixel(4, 4)) < 100
