"""Plans beside published measurements: the page is what the record says, and the record what plans say today."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

import lowtide
from bench.measured import compare, reports
from bench.measured.runs import NOT_PLANNED, RUNS
from lowtide.planning.report import report_of
from models import own as own_model
from support import needs_transformers_5

RECORD: dict[str, Any] = json.loads(compare.DATA.read_text())
GIB = 2**30
CHEAP = (21, 31, 33)


def test_the_page_and_the_drawing_show_the_record():
    assert compare.PAGE.read_text() == compare.page(RECORD)
    assert compare.DRAWING.read_text() == compare.drawing(RECORD)


def test_every_published_figure_is_planned_or_says_why_not():
    names = [run.name for run in (*RUNS, *NOT_PLANNED)]
    assert len(names) == len(set(names))
    assert RECORD.keys() == {str(run.number) for run in RUNS}
    assert all(run.why_not for run in NOT_PLANNED)
    assert all(run.source.startswith("https://") for run in (*RUNS, *NOT_PLANNED))


@needs_transformers_5
@pytest.mark.parametrize("number", CHEAP)
def test_a_run_that_is_planned_again_is_the_record_s(number: int):
    (run,) = (run for run in RUNS if run.number == number)
    again = compare.planned(run)
    assert {name: again[name] for name in ("allocated", "reserved")} == {
        name: RECORD[str(number)][name] for name in ("allocated", "reserved")
    }


@pytest.mark.parametrize(
    ("kinds", "measured", "median", "worst"),
    [
        (("one GPU", "FSDP2"), "allocated", 0.005, 0.02),
        (("one GPU", "FSDP2"), "reserved", 0.03, 0.06),
        (("ZeRO-3", "DDP"), "allocated", 0.05, 0.05),
    ],
)
def test_errors_are_small_or_explained(kinds: tuple[str, ...], measured: str, median: float, worst: float):
    errors = {
        run.name: abs(compare.error(run, RECORD[str(run.number)]))
        for run in RUNS
        if run.kind in kinds and run.measured == measured
    }
    assert statistics.median(errors.values()) <= median
    noted = {run.name for run in RUNS if run.note}
    assert [name for name, error in errors.items() if error > worst and name not in noted] == []


def test_what_differs_from_the_record_is_said_and_only_stored_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
):
    first = RUNS[0]
    before = RECORD[str(first.number)]
    data = tmp_path / "record.json"
    data.write_text(json.dumps({str(first.number): before}))
    monkeypatch.setattr(compare, "DATA", data)
    monkeypatch.setattr(compare, "planned", lambda _: {**before, "allocated": before["allocated"] + 1})
    for options, more in (([], 0), (["--store"], 1)):
        monkeypatch.setattr("sys.argv", ["compare", str(first.number), *options])
        compare.main()
        assert f"allocated: {before['allocated'] + 1:,}, recorded {before['allocated']:,}" in capsys.readouterr().out
        assert json.loads(data.read_text())[str(first.number)]["allocated"] == before["allocated"] + more


def test_the_readme_says_what_the_record_says():
    errors = [abs(compare.error(run, RECORD[str(run.number)])) for run in RUNS]
    near = sum(error <= 0.02 for error in errors)
    text = " ".join((compare.DOCS.parent / "README.md").read_text().split())
    median = f"{100 * statistics.median(errors):.1f} %"
    facts = text.partition("Three facts")[2].partition("**The gradients are right.**")[0]
    large = sum(run.settings["device"].startswith(("H100", "A100")) for run in RUNS)
    assert (
        f"Of {len(errors)} figures that others measured on GPUs and published, {large} of them on H100s and A100s, the "
        f"median plan is {median} off, and {near} are within 2 %"
    ) in facts, "the first fact"


def test_the_documentation_says_what_compiled_runs_held():
    assert compare.compiled_range() in " ".join((compare.DOCS / "plan.md").read_text().split())


def test_a_report_becomes_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    model, batch = own_model.tiny()
    plan = lowtide.plan(model, batch=batch, device="H100", policy="recompute", optimizer="sgd")
    report = json.loads(report_of(plan))
    assert (report["settings"], report["policy"]) == ({"optimizer": "sgd"}, "recompute")
    assert reports.rows_of(report) == [], "nothing is measured yet"
    planned = report["planned"]["allocated_bytes"]
    report["measured"] |= {"allocated_bytes": planned * 2, "gpu": "H100", "source": "https://example.org/run"}
    (row,) = reports.rows_of(report)
    assert row.startswith("| [Own, its own batch, recompute](https://example.org/run) | one GPU, allocated | ")
    assert row.endswith("| -50.0% |")
