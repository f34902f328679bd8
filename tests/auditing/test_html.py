"""Pages: what is in them, and what a browser makes of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import lowtide
from lowtide.auditing import AuditReport, Verdict
from lowtide.auditing.html import as_html
from lowtide.errors import MissingDependencyError
from lowtide_zoo.page import as_html as as_zoo_html
from support.browser import needs_browser, show
from support.sample_reports import blocks, check, failure, record, records, report

pytest.importorskip("jinja2", reason="the html extra is not installed")
pytest.importorskip("plotly", reason="the html extra is not installed")

LOOK = (Path(lowtide.__file__).parent / "templates/look.css").read_text()
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))

    def with_attribute(self, name: str) -> list[dict]:
        return [attributes for _, attributes in self.found if name in attributes]


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def page() -> str:
    return as_html(report())


def test_every_check_is_there_with_its_verdict_failures_first(page: str):
    found = [(tag["data-check"], tag["data-verdict"]) for tag in Tags(page).with_attribute("data-check")]
    assert found == [
        ("gradients present", "fail"),
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
    [(Verdict.PASS, ">ok<"), (Verdict.FAIL, ">not ok<"), (Verdict.INCONCLUSIVE, "nothing was proven")],
)
def test_the_head_says_how_it_stands(verdict: Verdict, words: str):
    page = as_html(AuditReport(model="M", seed=0, blocks={}, checks=[check("outputs", verdict)]))
    assert words in page
    assert ("nothing was proven" in page) == (verdict is Verdict.INCONCLUSIVE)


def test_the_script_is_there_only_with_a_chart(page: str):
    assert len(page) > 3_000_000
    empty = dataclasses.replace(report(), blocks={"default": []})
    assert len(as_html(empty)) < 30_000


def test_the_chart_leaves_out_small_stacks_of_many_and_says_so():
    many = [
        block | {"stack": f"experts.{number}", "name": f"experts.{number}.{block['name'][-1]}", "plain_bytes": number}
        for number in range(20)
        for block in blocks()[:3]
    ]
    page = as_html(dataclasses.replace(report(), blocks={"default": many}))
    assert "The 12 stacks that hold most; 8 more hold less." in page
    data = page.partition("Plotly.newPlot(")[2]
    assert '"experts.19"' in data
    assert '"experts.7"' not in data


def test_the_same_report_gives_the_same_page(page: str):
    assert as_html(report()) == page


def test_a_report_makes_its_own_page(page: str):
    assert report().to_html() == page


@pytest.fixture(scope="module")
def zoo() -> str:
    return as_zoo_html(records())


def test_the_zoo_shows_failing_models_first(zoo: str):
    found = [tag["data-model"] for tag in Tags(zoo).with_attribute("data-model")]
    assert found == ["zeta", "broken", "alpha", "doubtful", "unbuilt"]


def model_part(zoo: str, model_type: str) -> str:
    return re.search(rf'<tbody data-model="{model_type}".*?</tbody>', zoo, flags=re.DOTALL)[0]


def test_the_zoo_has_a_verdict_for_each_mode_and_check(zoo: str):
    def cells(model_type: str) -> list[str]:
        return re.findall(r'<td class="v [\w-]+">([^<]*)</td>', model_part(zoo, model_type))

    assert cells("alpha") == ["ok", "ok", "-"] * 2
    assert cells("zeta") == ["ok", "FAIL", "-", "ok", "ok", "-"]
    assert cells("doubtful") == ["FAIL?", "ok", "-", "ok", "ok", "-"]


def test_the_zoo_explains_failures_and_how_to_repeat_them(zoo: str):
    part = model_part(zoo, "zeta")
    for words in ("1 failure: gradient values", "is &lt;i&gt;wrong", "repair it", "layers.0.weight", "ZetaModel"):
        assert words in part
    assert "lowtide audit zeta --policy &#39;default &amp; tile&#39;" in part
    for one in records():
        assert one.command in model_part(zoo, one.model_type)
    assert "failed to run: ValueError: no &lt;batch&gt; fits" in model_part(zoo, "broken")
    assert "not built: no rule" in model_part(zoo, "unbuilt")
    assert "failed once, not confirmed" in model_part(zoo, "doubtful")


def test_the_zoo_counts_by_check(zoo: str):
    rows = dict(re.findall(r'<tr><th>([^<]*)</th>(<td class="bar">.*?)</tr>', zoo, flags=re.DOTALL))
    counts = {name: list(map(int, re.findall(r"<td>(\d+)</td>", row))) for name, row in rows.items()}
    assert counts == {
        "outputs": [5, 0, 1, 0, 0, 0],
        "gradient values": [5, 1, 0, 0, 0, 1],
        "experts": [0, 0, 0, 0, 6, 0],
    }


def test_a_check_that_fails_everywhere_puts_no_model_first():
    verdicts = {"default": {"outputs": "pass", "idempotent": "fail"}}
    both = {"default": {"outputs": "fail", "idempotent": "fail"}}
    page = as_zoo_html(
        [record(name, verdicts=verdicts, failures=[failure("idempotent")]) for name in ("a", "b", "c")]
        + [record("z", verdicts=both, failures=[failure("idempotent"), failure("outputs")])]
    )
    assert "Fails for most models: idempotent [default]." in page
    assert [tag["data-model"] for tag in Tags(page).with_attribute("data-model")] == ["z", "a", "b", "c"]
    assert "1 failure: outputs" in page
    assert model_part(page, "a").count("FAIL") == 1


def test_a_set_up_that_does_not_run_has_a_column_of_its_own():
    broken = {"default": {"outputs": "pass"}, "reentrant": {"runs": "fail"}}
    page = as_zoo_html([record("a", verdicts=broken, failures=[failure("runs", "reentrant")])])
    rows = re.findall(r'<td class="mode">(\w+)</td>(.*?)</tr>', page)
    assert [(mode, re.findall(r">([^<]*)</td>", row)) for mode, row in rows] == [
        ("default", ["ok", "ok"]),
        ("reentrant", ["FAIL", ""]),
    ]


def test_each_engine_has_its_table():
    page = as_zoo_html([record("a"), record("a", engine="lowtide", verdicts={"recompute": {"outputs": "pass"}})])
    assert re.findall("<h2>(.*?)</h2>", page) == ["transformers", "lowtide"]


@pytest.mark.parametrize("make", [lambda: as_html(report()), lambda: as_zoo_html(records())], ids=["report", "zoo"])
def test_a_page_names_nothing_to_load(make):
    page = make()
    tags = Tags(page)
    assert not tags.with_attribute("src")
    assert not tags.with_attribute("href")
    assert "@import" not in without_scripts(page)
    assert "url(" not in without_scripts(page)
    assert "default-src 'none'" in page, "and the browser is told so"


@pytest.mark.parametrize("missing", ["jinja2", "plotly.io"])
def test_without_the_extra_the_error_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=r"pip install lowtide\[html\]"):
        as_html(report())


def test_the_zoo_needs_no_plotly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    assert "zeta" in as_zoo_html(records())


def colours(block: str) -> dict[str, tuple[float, ...]]:
    pairs = re.findall(r"--([\w-]+): #(\w{6});", block)
    return {name: tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, value in pairs}


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """As the WCAG defines it."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@SCHEMES
def test_words_can_be_read_on_their_ground(scheme: str):
    light, dark = LOOK.split("@media (prefers-color-scheme: dark)")
    palettes = {"light": colours(light), "dark": colours(dark.split("* {")[0])}
    assert palettes["light"].keys() == palettes["dark"].keys()
    palette = palettes[scheme]
    pairs = [(kind, f"{kind}-ground") for kind in ("pass", "fail", "inconclusive", "not-applicable", "accent")]
    pairs += itertools.product(["text", "quiet", "accent"], ["ground", "card"])
    for ink, ground in pairs:
        assert contrast(palette[ink], palette[ground]) >= 4.5, (scheme, ink, ground)


@needs_browser
@SCHEMES
def test_a_browser_shows_the_report(scheme: str, page: str, tmp_path: Path):
    probe = """
      const seen = element => element && element.getBoundingClientRect().height > 0;
      const colour = (selector, property) => getComputedStyle(document.querySelector(selector))[property];
      return {
        verdicts: [...document.querySelectorAll(".check .verdict")].filter(seen).map(e => e.textContent),
        cells: [...document.querySelectorAll(".cells .cell")].filter(seen).length,
        bars: [...document.querySelectorAll("#memory svg .bars .point path")].filter(seen).length,
        ticks: [...document.querySelectorAll("#memory svg text")].map(e => e.textContent),
        ink: colour("#memory svg .ytick text", "fill"), text: colour("body", "color"),
        loaded: performance.getEntriesByType("resource").map(e => e.name),
      }"""
    shown = show(page, tmp_path, scheme=scheme, probe=probe)
    assert shown.answer["verdicts"] == ["fail", "inconclusive", "pass", "not applicable", "pass"]
    assert shown.answer["cells"] == 12
    assert shown.answer["bars"] == 18, "six blocks: plain and in two modes"
    assert {"vision.blocks", "text.layers", "MiB", "plain", "reentrant"} <= set(shown.answer["ticks"])
    assert shown.answer["ink"] == shown.answer["text"], "the chart takes its ink from the page"
    assert shown.console == []
    assert shown.answer["loaded"] == []
    assert sum(shown.pixel(4, 4)) > 700 if scheme == "light" else sum(shown.pixel(4, 4)) < 100


@needs_browser
@SCHEMES
def test_a_browser_shows_the_zoo(scheme: str, zoo: str, tmp_path: Path):
    probe = """
      const models = () => [...document.querySelectorAll("tbody[data-model]")]
        .filter(e => e.getBoundingClientRect().height > 0).map(e => e.dataset.model);
      const all = models();
      document.getElementById("failing").click();
      const failing = models(), words = document.getElementById("shown").textContent;
      return {all, failing, words, loaded: performance.getEntriesByType("resource").map(e => e.name)};"""
    shown = show(zoo, tmp_path, scheme=scheme, probe=probe)
    assert shown.answer == {
        "all": ["zeta", "broken", "alpha", "doubtful", "unbuilt"],
        "failing": ["zeta"],
        "words": "1 of 5 models",
        "loaded": [],
    }
    assert shown.console == []
    assert sum(shown.pixel(4, 4)) > 700 if scheme == "light" else sum(shown.pixel(4, 4)) < 100


@needs_browser
def test_the_zoo_is_filtered_by_the_words_of_a_link(zoo: str, tmp_path: Path):
    probe = 'return [...document.querySelectorAll("tbody[data-model]:not([hidden])")].map(e => e.dataset.model)'
    assert show(zoo, tmp_path, fragment="#DOUBTFULmodel%20outputs", probe=probe).answer == ["doubtful"]


@needs_browser
def test_the_browser_would_tell(page: str, tmp_path: Path):
    """What the tests above do not see must be absent, not overlooked: here it is present."""
    tampered = page.replace("</main>", '<img src="https://example.invalid/x.png"><script>nowhere()</script></main>')
    console = "\n".join(show(tampered, tmp_path).console)
    assert "Content Security Policy" in console
    assert "nowhere is not defined" in console
