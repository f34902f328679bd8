"""Pages: what is in them, and what a browser makes of them."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING

import pytest

from lowtide.auditing import AuditReport, Verdict
from lowtide.auditing.html import as_html
from lowtide.errors import MissingDependencyError
from lowtide_zoo.page import as_html as as_zoo_html
from support.browser import needs_browser, show
from support.html_tags import Tags, without_scripts
from support.sample_reports import blocks, check, records, report

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("jinja2", reason="the html extra is not installed")


@pytest.fixture(scope="module")
def page() -> str:
    return as_html(report())


def test_every_check_is_there_with_its_verdict_failures_first(page: str):
    found = [(tag["data-check"], tag["data-verdict"]) for tag in Tags(page).with_attribute("data-check")]
    assert found == [
        ("gradients present", "wrong"),
        ("memory", "inconclusive"),
        ("gradient values", "pass"),
        ("experts", "not applicable"),
        ("outputs", "pass"),
    ]


def test_summary_remedy_and_evidence_are_there_and_escaped(page: str):
    text = without_scripts(page)
    assert "2 of 9 parameters &lt;b&gt;lost&lt;/b&gt; 50% &amp; more" in text
    assert "<b>lost" not in text
    assert "use_reentrant=False," in text
    assert "layers.1.weight" in text
    assert "2 KiB" in text, "bytes are written as people read them"
    assert "unused" not in text, "what passed needs no remedy"
    assert re.search(r"<details[^>]*><summary[^>]*>what gradient values found", text), "evidence can be opened"


def test_the_map_has_a_cell_for_each_block_and_mode(page: str):
    cells = re.findall(r'<li class="cell (\w+)" title="([^"]*)"><small>(\d)</small><b>([^<]*)</b>', page)
    assert len(cells) == 12
    assert cells[0][0::3] == ("once", "1 / 1")
    assert cells[0][1] == "text.layers.0: 1 in forward, 1 in backward; held 5.86 KiB plain, 500 B now"
    assert [cell[0] for cell in cells[6:]] == ["more"] + ["never"] * 5
    assert cells[6][3] == "1 / 2"


@pytest.mark.parametrize(
    ("verdict", "words"),
    [(Verdict.PASS, ">ok<"), (Verdict.FAIL, ">not ok<"), (Verdict.INCONCLUSIVE, "nothing is proven")],
)
def test_the_head_says_how_it_stands(verdict: Verdict, words: str):
    page = as_html(AuditReport(model="M", seed=0, blocks={}, checks=[check("outputs", verdict)]))
    assert words in page
    assert ("nothing is proven" in page) == (verdict is Verdict.INCONCLUSIVE)


def test_a_chart_is_there_only_if_blocks_hold_something(page: str):
    assert page.count('<svg class="chart"') == 2, "one for each stack"
    empty = dataclasses.replace(report(), blocks={"default": []})
    assert "<svg" not in as_html(empty)


def test_the_chart_leaves_out_small_stacks_of_many_and_says_so():
    many = [
        block | {"stack": f"experts.{number}", "name": f"experts.{number}.{block['name'][-1]}", "plain_bytes": number}
        for number in range(20)
        for block in blocks()[:3]
    ]
    page = as_html(dataclasses.replace(report(), blocks={"default": many}))
    assert "The 12 stacks that hold most; 8 more hold less." in page
    drawn = page.partition("Memory held after forward")[2]
    assert "<h3>experts.19</h3>" in drawn
    assert "<h3>experts.7</h3>" not in drawn


def test_the_same_report_gives_the_same_page(page: str):
    assert as_html(report()) == page


def test_a_report_makes_its_own_page(page: str):
    assert report().to_html() == page


@pytest.mark.parametrize("make", [lambda: as_html(report()), lambda: as_zoo_html(records())], ids=["report", "zoo"])
def test_a_page_names_nothing_to_load(make):
    page = make()
    tags = Tags(page)
    assert not tags.with_attribute("src")
    assert not tags.with_attribute("href")
    assert "@import" not in without_scripts(page)
    assert "url(" not in without_scripts(page)
    assert "default-src 'none'" in page, "and the browser is told so"


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match=r"pip install lowtide\[html\]"):
        as_html(report())


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_report(scheme: str, page: str, tmp_path: Path):
    probe = """
      const seen = element => element && element.getBoundingClientRect().height > 0;
      const colour = (selector, property) => getComputedStyle(document.querySelector(selector))[property];
      return {
        verdicts: [...document.querySelectorAll(".check .verdict")].filter(seen).map(e => e.textContent),
        cells: [...document.querySelectorAll(".cells .cell")].filter(seen).length,
        bars: document.querySelectorAll("svg.chart .bar").length,
        ticks: [...document.querySelectorAll("svg.chart text, h3")].map(e => e.textContent),
        ink: colour("svg.chart text", "fill"), text: colour("body", "color"),
        loaded: performance.getEntriesByType("resource").map(e => e.name),
      }"""
    shown = show(page, tmp_path, scheme=scheme, probe=probe)
    assert shown.answer["verdicts"] == ["wrong", "inconclusive", "pass", "not applicable", "pass"]
    assert shown.answer["cells"] == 12
    assert shown.answer["bars"] == 18, "six blocks: plain and in two modes"
    assert {"vision.blocks", "text.layers", "MiB", "plain", "reentrant"} <= set(shown.answer["ticks"])
    assert shown.answer["ink"] == shown.answer["text"], "the chart takes its ink from the page"
    assert shown.console == []
    assert shown.answer["loaded"] == []
    assert sum(shown.pixel(4, 4)) > 700 if scheme == "light" else sum(shown.pixel(4, 4)) < 100


@needs_browser
def test_the_browser_would_tell(page: str, tmp_path: Path):
    """What the tests above do not see must be absent, not overlooked: here it is present."""
    tampered = page.replace("</main>", '<img src="https://example.invalid/x.png"><script>nowhere()</script></main>')
    console = "\n".join(show(tampered, tmp_path).console)
    assert "Content Security Policy" in console
    assert "nowhere is not defined" in console
