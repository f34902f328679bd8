"""A record: what is in it, what is not, and how it is read and judged."""

from __future__ import annotations

import dataclasses
import getpass
import json
import platform
import re
from pathlib import Path

import pytest
import torch

from lowtide.auditing.grades import Grade
from lowtide.auditing.result import Verdict
from lowtide.errors import InvalidValueError
from lowtide.selftest import STAGES, Record, Row, StageResult, environment, read_record
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
        (
            {"right": Verdict.PASS, "frees": Verdict.INCONCLUSIVE, "plans": Verdict.INCONCLUSIVE},
            True,
            "ok; not proven: frees, plans",
        ),
        ({"right": Verdict.PASS, "plans": Verdict.FAIL}, False, "failed: plans (wrong)"),
        ({"frees": Verdict.PASS}, False, "nothing failed, but the gradients are not proven right"),
        (
            {"right": Verdict.INCONCLUSIVE},
            False,
            "nothing failed, but the gradients are not proven right; not proven: right",
        ),
    ],
)
def test_a_record_is_ok_if_gradients_are_proven_and_nothing_failed(verdicts, ok, conclusion):
    assert (record(**verdicts).ok, record(**verdicts).conclusion) == (ok, conclusion)


def failure(grade: Grade) -> Row:
    return Row(name="a row", verdict=Verdict.FAIL, grade=grade, summary="as it should not be")


def test_a_mild_failure_is_said_and_does_not_count():
    proven = StageResult(name="right", rows=[row()])
    plans = StageResult(name="plans", rows=[failure(Grade.UNTIDY)])
    frees = StageResult(name="frees", rows=[failure(Grade.UNTIDY), failure(Grade.NO_EFFECT)])
    mild = dataclasses.replace(record(), stages=[proven, plans])
    assert (mild.ok, mild.conclusion.split("; ")[:2]) == (True, ["ok", "does not count: plans (untidy)"])
    both = dataclasses.replace(record(), stages=[proven, frees, plans])
    assert both.conclusion.split("; ")[:2] == [
        "failed: frees (no-effect)",
        "does not count: frees (untidy), plans (untidy)",
    ]
    assert dataclasses.replace(mild, fail_on=Grade.UNTIDY).conclusion.startswith("failed: plans (untidy)")
    assert dataclasses.replace(both, fail_on=Grade.WRONG).ok


def test_a_grade_is_a_failures():
    assert [Row(name="", verdict=verdict, summary="", grade=Grade.UNTIDY).grade for verdict in (*Verdict, None)] == [
        Grade.UNTIDY if verdict is Verdict.FAIL else None for verdict in (*Verdict, None)
    ]
    assert Row(name="", verdict=Verdict.FAIL, summary="").grade is Grade.WRONG


def test_an_older_record_is_read(tmp_path):
    """Records were published before there were grades, ranks and a total of seconds."""
    data = record(right=Verdict.PASS, frees=Verdict.FAIL).to_dict()
    for name in ("fail_on", "ranks", "seconds", "conclusion"):
        del data[name]
    for stage in data["stages"]:
        for found in stage["rows"]:
            del found["grade"]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    assert read_record(path) == record(right=Verdict.PASS, frees=Verdict.FAIL)


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


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("file:///home/me/x is missing", "<path> is missing"),
        ("cannot copy host:/home/me/x to me@host:/data/y", "cannot copy <path> to <path>"),
        ("see https://a.org/home/b and http://a.org:80/c/d", "see https://a.org/home/b and http://a.org:80/c/d"),
        ("a/b of and/or, tokens 3/4/5", "a/b of and/or, tokens 3/4/5"),
    ],
)
def test_a_path_is_found_in_any_form(message, left):
    assert without_paths(message) == left


def test_the_environment_names_no_person_and_no_machine(sim):
    with open_bench(sim, quick=True) as bench:
        text = json.dumps(describe(bench))
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert not re.search(rf'"{re.escape(getpass.getuser())}"', text)
    assert "Lowtide emulated accelerator" in text


def test_the_environment_has_the_versions_of_a_gpus_libraries(sim, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    with open_bench(sim, quick=True) as bench:
        runtime = environment.describe(bench)["runtime"]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        without = environment.describe(bench)["runtime"]
    assert (runtime["cudnn"], runtime["nccl"], without["nccl"]) == ("91002", "2.27.5", None)
    assert "unsloth-zoo" in environment.PACKAGES


def test_every_threshold_is_explained():
    page = (Path(__file__).parents[2] / "docs" / "selftest.md").read_text()
    for field in dataclasses.fields(Thresholds):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{field.name}` |"))
        value = getattr(THRESHOLDS, field.name)
        assert f"| {value:.0%} |" in line or f"| {value:g} |" in line, line


def test_text_and_page_show_every_row_and_reason():
    figures = {"planned_peak_bytes": 1, "peak_bytes": 1, "planned_seconds": 2.0, "seconds": 1.0}
    planned = dataclasses.replace(failure(Grade.UNTIDY), figures=figures)
    shown = dataclasses.replace(
        record(right=Verdict.PASS),
        stages=[
            StageResult(name="frees", rows=[row(peak_bytes=2**20, expected_peak_bytes=2**21)]),
            StageResult(name="plans", rows=[planned], seconds=3.0),
            StageResult(name="ranks", why="<one> process"),
        ],
    )
    text = as_text(shown)
    assert "  ok        a row: as it should be" in text
    assert "  untidy    a row: as it should not be" in text
    assert "not run: <one> process" in text
    assert word_for(StageResult(name="peers", rows=[row(None)])) == "measured"
    assert text.splitlines()[1] == "3 s, failures count from unsafe on"
    page = as_html(shown)
    assert "&lt;one&gt; process" in page
    assert "peaks-frees" in page, "the chart of peaks"
    assert "steps-plans" in page, "the chart of seconds"
    assert "does not count: plans (untidy)" in page
    assert '<span class="verdict untidy">' in page
