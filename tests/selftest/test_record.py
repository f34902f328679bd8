"""A record: what is in it, what is not, and how it is read and judged."""

from __future__ import annotations

import dataclasses
import getpass
import json
import platform
import re
from pathlib import Path

import pytest

from lowtide.auditing.result import Verdict
from lowtide.errors import InvalidValueError
from lowtide.selftest import STAGES, Record, Row, StageResult, read_record
from lowtide.selftest.bench import open_bench
from lowtide.selftest.environment import describe
from lowtide.selftest.page import as_html
from lowtide.selftest.record import without_paths
from lowtide.selftest.report import as_text, word_for
from lowtide.selftest.thresholds import THRESHOLDS, Thresholds

ENVIRONMENT = {"device": {"name": "Card", "type": "cuda"}, "packages": {"torch": "2.13.0"}}


def row(verdict: Verdict | None = Verdict.PASS, **figures) -> Row:
    return Row(name="a row", verdict=verdict, summary="as it should be", figures=figures)


def record(**verdicts: Verdict) -> Record:
    stages = [
        StageResult(
            name=name, rows=[row(verdicts[name])] if name in verdicts else [], why="" if name in verdicts else "no"
        )
        for name in STAGES
    ]
    return Record(quick=True, date="2026-01-02", environment=ENVIRONMENT, stages=stages)


@pytest.mark.parametrize(
    ("verdicts", "ok", "conclusion"),
    [
        ({"right": Verdict.PASS}, True, "ok"),
        ({"right": Verdict.PASS, "plans": Verdict.INCONCLUSIVE}, True, "ok"),
        ({"right": Verdict.PASS, "plans": Verdict.FAIL}, False, "failed: plans"),
        ({"frees": Verdict.PASS}, False, "nothing failed, but the gradients are not proven right"),
        ({"right": Verdict.INCONCLUSIVE}, False, "nothing failed, but the gradients are not proven right"),
    ],
)
def test_a_record_is_ok_if_gradients_are_proven_and_nothing_failed(verdicts, ok, conclusion):
    assert (record(**verdicts).ok, record(**verdicts).conclusion) == (ok, conclusion)


def test_the_worst_row_decides():
    worst = [row(Verdict.PASS), row(None), row(Verdict.INCONCLUSIVE), row(Verdict.FAIL)]
    verdicts = [StageResult(name="right", rows=worst[:count]).verdict for count in range(1, 5)]
    assert verdicts == ["pass", "pass", "inconclusive", "fail"]
    assert StageResult(name="right").verdict == "not applicable"


def test_a_record_is_read_as_it_was_written(tmp_path):
    written = record(right=Verdict.PASS, frees=Verdict.FAIL)
    path = tmp_path / "record.json"
    path.write_text(written.to_json())
    assert read_record(path) == written


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}', '{"format": 99}'])
def test_a_file_that_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"record\.json is (not )?a record"):
        read_record(path)


def test_messages_lose_their_paths():
    said = without_paths(
        "/home/me/model.py: no file /tmp/x-1/y, 3/4 of C:\\Users\\me\\x is at https://a.org/b/c\nsecond"
    )
    assert said == "<path>: no file <path>, 3/4 of <path> is at https://a.org/b/c"


def test_the_environment_names_no_person_and_no_machine(sim):
    with open_bench(sim, quick=True) as bench:
        text = json.dumps(describe(bench))
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert not re.search(rf'"{re.escape(getpass.getuser())}"', text)
    assert "Lowtide emulated accelerator" in text


def test_every_threshold_is_explained():
    page = (Path(__file__).parents[2] / "docs" / "selftest.md").read_text()
    for field in dataclasses.fields(Thresholds):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{field.name}` |"))
        value = getattr(THRESHOLDS, field.name)
        assert f"| {value:.0%} |" in line or f"| {value} |" in line, line


def test_text_and_page_show_every_row_and_reason():
    shown = dataclasses.replace(
        record(right=Verdict.PASS),
        stages=[
            StageResult(name="frees", rows=[row(peak_bytes=2**20, expected_peak_bytes=2**21)]),
            StageResult(name="ranks", why="<one> process"),
        ],
    )
    text = as_text(shown)
    assert "ok    a row: as it should be" in text
    assert "not run: <one> process" in text
    assert word_for(StageResult(name="peers", rows=[row(None)])) == "measured"
    page = as_html(shown)
    assert "&lt;one&gt; process" in page
    assert "peaks-frees" in page, "the chart of peaks"
