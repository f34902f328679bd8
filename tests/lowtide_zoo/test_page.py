"""The zoo's page: what is in it, and what a browser makes of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from bench import zoo_page
from lowtide_zoo.page import as_html, as_json
from lowtide_zoo.records import Pass, Record
from support.browser import needs_browser, show
from support.html_tags import Tags
from support.sample_reports import failure, record, records

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("jinja2", reason="the html extra is not installed")


PLAIN_CHECK = {"plain model": {"parameters reached": "pass"}}


def surveyed(name: str, *failures: tuple[str, str], status="audited", variant="", **more) -> Record:
    found = [{"mode": mode, "name": check, "summary": "it is so", "evidence": {}} for mode, check in failures]
    return Record(
        model_type=name,
        engine="transformers",
        status=status,
        versions={},
        command=f"lowtide audit {name}",
        model_class="M",
        failures=found,
        variant=variant,
        **more,
    )


def test_the_written_page_names_subjects_and_judges_plain_models(tmp_path: Path):
    audited = PLAIN_CHECK | {"default": {"memory": "pass"}}
    theirs = [
        surveyed("cut", ("plain model", "parameters reached"), status="no checkpointing", verdicts=PLAIN_CHECK),
        surveyed("two", ("default", "memory"), variant="moe", verdicts=audited, shown={"default: memory": False}),
        surveyed("fine", verdicts=audited, shown={}),
        surveyed("bare", status="no checkpointing", verdicts=PLAIN_CHECK),
    ]
    paths = [tmp_path / name for name in ("transformers-9.9.json", "lowtide-on-transformers-9.9.json")]
    paths[0].write_text(as_json(theirs, Pass(seconds=5400.0, workers=2, subjects=3)))
    paths[1].write_text(as_json([surveyed("fine", verdicts=audited)]))
    page = zoo_page.page(*paths)
    assert page.count("The last pass: ") == 1
    assert "The last pass: 3 audited in 90 minutes with 2 workers." in page
    assert "| worst grade | default | reentrant | plain model |\n|---|---|---|---|\n| wrong | 0 | 0 | 1 |" in page
    assert "| no failure | 1 | 2 | 3 |" in page
    assert "| cut | M | wrong | plain model: parameters reached | it is so | `lowtide audit cut` |" in page
    assert "| two (moe) | M | no-effect | default: memory | it is so (not shown by a script) |" in page


SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


@pytest.fixture(scope="module")
def zoo() -> str:
    return as_html(records())


def test_the_zoo_shows_failing_models_first(zoo: str):
    found = [tag["data-model"] for tag in Tags(zoo).with_attribute("data-model")]
    assert found == ["zeta", "broken", "alpha", "doubtful", "unbuilt"]


def model_part(zoo: str, model_type: str) -> str:
    return re.search(rf'<tbody data-model="{model_type}".*?</tbody>', zoo, flags=re.DOTALL)[0]


def test_the_zoo_has_a_verdict_for_each_mode_and_check(zoo: str):
    def cells(model_type: str) -> list[str]:
        found = re.findall(r'<td class="v [\w-]+" title="([^"]*)">([^<]*)</td>', model_part(zoo, model_type))
        assert all((sign == "FAIL") == (title == "wrong") for title, sign in found)
        return [sign for _, sign in found]

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
    page = as_html(
        [record(name, verdicts=verdicts, failures=[failure("idempotent")]) for name in ("a", "b", "c")]
        + [record("z", verdicts=both, failures=[failure("idempotent"), failure("outputs")])]
    )
    assert "Fails for most models: idempotent [default]." in page
    assert [tag["data-model"] for tag in Tags(page).with_attribute("data-model")] == ["z", "a", "b", "c"]
    assert "1 failure: outputs" in page
    assert model_part(page, "a").count("FAIL") == 1


def test_a_set_up_that_does_not_run_has_a_column_of_its_own():
    broken = {"default": {"outputs": "pass"}, "reentrant": {"runs": "fail"}}
    page = as_html([record("a", verdicts=broken, failures=[failure("runs", "reentrant")])])
    rows = re.findall(r'<td class="mode">(\w+)</td>(.*?)</tr>', page)
    assert [(mode, re.findall(r">([^<]*)</td>", row)) for mode, row in rows] == [
        ("default", ["ok", "ok"]),
        ("reentrant", ["FAIL", ""]),
    ]


def test_each_engine_has_its_table():
    page = as_html([record("a"), record("a", engine="lowtide", verdicts={"recompute": {"outputs": "pass"}})])
    assert re.findall("<h2>(.*?)</h2>", page) == ["transformers", "lowtide"]


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
