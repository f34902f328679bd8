"""Running the stages: failures are findings, an interrupt loses nothing that is finished, and nothing stays behind."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lowtide import simdevice
from lowtide.auditing.grades import Grade
from lowtide.auditing.result import Verdict
from lowtide.cli import app
from lowtide.errors import InvalidValueError, LowtideError
from lowtide.selftest import StageResult, frees, peers, ranks, read_record, run, runner
from lowtide.selftest.bench import give_back
from lowtide.selftest.record import Row
from lowtide.selftest.thresholds import THRESHOLDS


def passing(name: str, calls: list[str]):
    def stage(_bench) -> StageResult:
        calls.append(name)
        return StageResult(name=name, rows=[Row(name="a row", verdict="pass", summary="as it should be")])

    return stage


@pytest.fixture
def calls(sim, monkeypatch) -> list[str]:
    """Stages that only note that they ran."""
    made: list[str] = []
    monkeypatch.setattr(runner, "gc", Namespace(collect=lambda: 0))  # it takes most of the time
    monkeypatch.setattr(runner, "STAGES", {name: passing(name, made) for name in runner.STAGES})
    return made


def selftest(*arguments: str):
    return CliRunner().invoke(app, ["selftest", "--device", "sim", *arguments])


def broken(error: BaseException):
    def stage(_bench):
        raise error

    return stage


def test_all_stages_run_in_order_and_the_record_is_written(calls, tmp_path):
    result = selftest("-o", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))
    assert result.exit_code == 0, result.output
    assert calls == ["right", "frees", "overlaps", "plans", "peers", "ranks"]
    assert json.loads((tmp_path / "r.json").read_text())["ok"] is True
    assert "Lowtide emulated accelerator" in (tmp_path / "r.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json"]


def interrupt(_bench):
    raise KeyboardInterrupt


def end(number: signal.Signals):
    def stage(_bench):
        os.kill(os.getpid(), number)
        time.sleep(60)

    return stage


@pytest.mark.parametrize("stage", [interrupt, end(signal.SIGTERM), end(signal.SIGHUP)], ids=["Ctrl-C", "TERM", "HUP"])
def test_an_interrupt_keeps_what_is_finished_and_the_rest_runs_later(calls, monkeypatch, tmp_path, stage):
    path = tmp_path / "r.json"
    finished = dict(runner.STAGES)
    monkeypatch.setitem(runner.STAGES, "overlaps", stage)
    before = set(Path(tempfile.gettempdir()).glob("lowtide-selftest-*"))
    result = selftest("-o", str(path))
    assert result.exit_code == 130
    assert "--resume" in result.stderr
    assert set(Path(tempfile.gettempdir()).glob("lowtide-selftest-*")) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [stage.name for stage in read_record(path).stages] == ["right", "frees"]

    calls.clear()
    monkeypatch.setattr(runner, "STAGES", finished)
    assert selftest("-o", str(path), "--resume").exit_code == 0
    assert calls == ["overlaps", "plans", "peers", "ranks"]


def test_a_record_of_another_kind_is_not_resumed(calls, tmp_path):
    path = tmp_path / "r.json"
    selftest("-o", str(path), "--quick")
    result = selftest("-o", str(path), "--resume")
    assert result.exit_code == 2
    assert "has a different quick" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("error", "verdict", "code"),
    [(RuntimeError("in /a/b/c.py"), "fail", 1), (torch.OutOfMemoryError("no room"), "inconclusive", 0)],
)
def test_a_stage_that_raises_is_a_finding_and_the_rest_runs(calls, monkeypatch, tmp_path, error, verdict, code):
    monkeypatch.setitem(runner.STAGES, "plans", broken(error))
    assert selftest("-o", str(tmp_path / "r.json")).exit_code == code
    assert calls == ["right", "frees", "overlaps", "peers", "ranks"]
    stage = read_record(tmp_path / "r.json")["plans"]
    assert stage.verdict == verdict
    assert "/a/b" not in stage.rows[0].summary


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--device", "cuda"], "not cuda"),
        (["-o", "/"], "is a directory"),
    ],
)
def test_what_cannot_run_is_refused(sim, arguments, said):
    result = CliRunner().invoke(app, ["selftest", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_missing_packages_are_named(sim, monkeypatch):
    monkeypatch.setattr(runner, "_NEEDED", ("no_such_package",))
    result = selftest()
    assert result.exit_code == 2
    assert "needs no_such_package" in result.stderr


def test_too_many_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(runner, "find_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(InvalidValueError, match="2 ranks need 2 devices, and this machine has 1"):
        run("cuda", ranks=2)


def test_a_stage_gives_back_all_memory(small_bench):
    gc.collect()
    before = simdevice.stats()
    assert frees.run(small_bench).verdict == "pass"
    gc.collect()
    after = simdevice.stats()
    assert (after.live_bytes, after.pinned_bytes) == (before.live_bytes, before.pinned_bytes)


def test_one_process_says_how_to_test_several(small_bench):
    assert "--ranks 2" in ranks.run(small_bench).why


def lost_device(*_):
    raise RuntimeError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"
    )


@pytest.mark.parametrize("raises", [True, False], ids=["the stage raises", "the error shows after the stage"])
def test_a_lost_device_ends_the_self_test_with_the_finding(calls, monkeypatch, tmp_path, raises):
    """As a CUDA error that sticks to the process does: giving memory back raises, too."""
    path = tmp_path / "r.json"
    finished = dict(runner.STAGES)

    def stage(bench) -> StageResult:
        monkeypatch.setattr(torch.accelerator, "synchronize", lost_device)
        return broken(RuntimeError("CUDA error"))(bench) if raises else finished["frees"](bench)

    monkeypatch.setitem(runner.STAGES, "frees", stage)
    result = selftest("-o", str(path))
    assert result.exit_code == 1, result.output
    assert "did not run: overlaps, plans, peers, ranks" in " ".join(result.stdout.split())
    right, frees = read_record(path).stages
    assert right.verdict == "pass"
    assert [row.name for row in frees.rows] == ["runs" if raises else "a row", "the device"]
    assert "no longer answers: CUDA error: an illegal memory access was encountered." in frees.rows[-1].summary

    calls.clear()
    monkeypatch.undo()
    monkeypatch.setattr(runner, "STAGES", finished)
    assert selftest("-o", str(path), "--resume").exit_code == 1, "the finding stays"
    assert calls == ["overlaps", "plans", "peers", "ranks"]


def test_memory_is_given_back_by_the_devices_own_module(monkeypatch):
    """torch.accelerator refuses a backend whose allocator is not a DeviceAllocator, as MPS' was."""
    given = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lost_device)
    for name, module in (("mps", Namespace(empty_cache=lambda: given.append("mps"))), ("npu", Namespace())):
        monkeypatch.setattr(torch, "get_device_module", lambda _, module=module: module)
        assert give_back(torch.device("mps")) == "", name
    assert given == ["mps"]


def test_a_stage_of_fewer_ranks_is_run_again(calls, monkeypatch, tmp_path):
    path = str(tmp_path / "r.json")
    monkeypatch.setattr(runner, "_check_ranks", lambda *_: None)
    selftest("-o", path)
    calls.clear()
    assert selftest("-o", path, "--resume", "--ranks", "2").exit_code == 0
    assert calls == ["ranks"]
    assert read_record(Path(path)).ranks == 2
    calls.clear()
    selftest("-o", path, "--resume", "--ranks", "2")
    assert calls == []


@pytest.mark.parametrize(
    ("grade", "arguments", "code"),
    [
        ("untidy", (), 0),
        ("untidy", ("--fail-on", "untidy"), 1),
        ("no-effect", (), 1),
        ("no-effect", ("--fail-on", "wrong"), 0),
        ("wrong", ("--fail-on", "wrong"), 1),
        ("wrong", ("--fail-on", "bad"), 2),
    ],
)
def test_the_exit_code_is_by_grade(calls, monkeypatch, tmp_path, grade, arguments, code):
    row = Row(name="a row", verdict=Verdict.FAIL, grade=Grade(grade), summary="as it should not be")
    monkeypatch.setitem(runner.STAGES, "plans", lambda _: StageResult(name="plans", rows=[row]))
    assert selftest("-o", str(tmp_path / "r.json"), *arguments).exit_code == code


@pytest.mark.parametrize(("over", "verdict"), [(True, "inconclusive"), (False, "fail")])
def test_ranks_that_hang_fail_and_ranks_without_time_prove_nothing(small_bench, monkeypatch, over, verdict):
    def output_of(*_arguments, timeout, **_settings):
        assert timeout <= ranks._TIMEOUT
        if over:
            small_bench.limits.deadline = time.monotonic() - 1
        raise LowtideError("no answer within 180 s")

    monkeypatch.setattr(ranks, "output_of", output_of)
    (row,) = ranks.run(dataclasses.replace(small_bench, ranks=2)).rows
    assert row.verdict == verdict


def test_each_stage_has_its_share_of_the_time(calls, monkeypatch, tmp_path):
    """What a stage leaves of its time goes to the next one; together they have less than ten minutes."""
    deadlines = []
    began = time.monotonic()

    def stage(name):
        def run(bench):
            deadlines.append(bench.limits.deadline - began)
            return StageResult(name=name)

        return run

    monkeypatch.setattr(runner, "STAGES", {name: stage(name) for name in runner.STAGES})
    selftest("-o", str(tmp_path / "r.json"))
    assert deadlines == sorted(set(deadlines))
    assert sum(runner._SHARES.values()) == pytest.approx(1)
    assert THRESHOLDS.seconds < 600
    assert deadlines[-1] - deadlines[0] == pytest.approx((1 - runner._SHARES["right"]) * THRESHOLDS.seconds)


@pytest.mark.slow
def test_a_whole_quick_self_test_of_the_emulated_device(sim, tmp_path):
    result = selftest("--quick", "-o", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    verdicts = {stage.name: stage.verdict for stage in read_record(tmp_path / "r.json").stages}
    assert verdicts == {
        "right": "pass",
        "frees": "pass",
        "overlaps": "pass",
        "plans": "pass",
        "peers": "not applicable",
        "ranks": "not applicable",
    }


@pytest.mark.slow
def test_two_ranks_of_the_emulated_device(small_bench):
    found = ranks.run(dataclasses.replace(small_bench, ranks=2))
    assert [row.verdict for row in found.rows] == ["pass"] * 4, found


@pytest.mark.slow
def test_an_engine_that_is_wrong_on_the_second_rank_is_caught(small_bench, monkeypatch):
    """A tile drops a gradient there: DDP and FSDP2 average it into those of all ranks."""
    monkeypatch.setattr(ranks, "RANK", "support.broken_rank")
    found = ranks.run(dataclasses.replace(small_bench, ranks=2))
    wrong = {row.name.split(",")[0] for row in found.failures if "gradients are wrong" in row.summary}
    assert wrong == {"DDP", "FSDP2"}, found
    assert all("tile" in row.name and row.grade == "wrong" for row in found.failures)
    assert [row.verdict for row in found.rows if "tile" not in row.name] == ["pass"] * 2


@pytest.mark.slow
def test_peers_that_patch_run_in_processes_of_their_own(small_bench):
    rows = {row.name: row for row in peers.run(dataclasses.replace(small_bench, quick=False)).rows}
    assert rows["transformers' flag, TRL's offload"].figures["peak_bytes"] > 0
    recompute, flag = (
        rows[name].figures["after_forward_bytes"] for name in ("Lowtide, recompute", "transformers' flag")
    )
    assert recompute == flag
