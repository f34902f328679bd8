"""The rows of a stage: one that raises is a finding and the others run, and two things end a stage early."""

from __future__ import annotations

import contextlib
import gc
import time

import pytest
import torch

from lowtide import simdevice
from lowtide.auditing.grades import Grade
from lowtide.selftest import frees, overlaps, peers, plans, right
from lowtide.selftest.bench import read_work
from lowtide.selftest.findings import Findings
from lowtide.selftest.record import Row
from lowtide.selftest.steps import twins
from lowtide.stores import host


def a_row() -> Row:
    return Row(name="a row", verdict="pass", summary="as it should be")


def raising(error: Exception):
    def measure() -> Row:
        raise error

    return measure


def test_a_row_that_raises_is_that_rows_finding(small_bench):
    found = Findings(bench=small_bench)
    found.add("first", raising(RuntimeError("in /a/b/c.py")))
    found.add("second", raising(ValueError("a plan")), grade=Grade.UNTIDY)
    found.add("third", raising(torch.OutOfMemoryError("no room")))
    found.add("fourth", a_row)
    rows = found.stage("right").rows
    assert [(row.name, row.verdict, row.grade) for row in rows] == [
        ("first", "fail", "wrong"),
        ("second", "fail", "untidy"),
        ("third", "inconclusive", None),
        ("a row", "pass", None),
    ]
    assert rows[0].summary == "it raises RuntimeError: in <path>"


def test_what_there_is_no_time_for_is_named_and_proves_nothing(small_bench):
    found = Findings(bench=small_bench)
    found.add("first", a_row)
    small_bench.limits.deadline = time.monotonic() - 1
    for name in ("second", "third", "third"):
        found.add(name, a_row)
    stage = found.stage("right")
    assert [(row.name, row.verdict) for row in stage.rows] == [("a row", "pass"), ("left out: time", "inconclusive")]
    assert stage.rows[-1].figures == {"left_out": ["second", "third"]}
    assert stage.verdict == "inconclusive"


def test_rows_after_a_lost_device_are_left_out(small_bench, monkeypatch):
    found = Findings(bench=small_bench)
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", raising_device)
        found.add("first", raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    found.add("second", a_row)
    assert small_bench.limits.lost == "CUDA error: an illegal memory access was encountered"
    assert [row.name for row in found.stage("right").rows] == ["first", "left out: the device no longer answers"]


def raising_device(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")


STRESSES = ("streams that are late", "an allocator full of holes", "several threads")
KEPT = {
    right: f"llama, {right.POLICIES[3]}, fp32",
    frees: "recompute",
    overlaps: "step, recompute",
    plans: "recompute",
}
"""A row of each stage that needs no offload."""


@pytest.mark.parametrize("stage", [right, frees, overlaps, plans], ids=lambda stage: stage.__name__.split(".")[-1])
def test_one_policy_that_raises_leaves_the_other_rows_of_its_stage(small_bench, monkeypatch, stage):
    """Steps with offload raise; those without it are judged as ever."""

    def put(*_arguments, **_settings):
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(host.HostStore, "put", put)
    rows = stage.run(small_bench).rows
    broken = [row for row in rows if row.verdict == "fail"]
    assert broken
    assert all("no pinned memory" in row.summary for row in broken)
    assert all("offload" in row.name or row.name in STRESSES for row in broken)
    assert KEPT[stage] in [row.name for row in rows if row not in broken]


def test_a_step_that_raises_leaves_no_gradients_for_the_next_measurement(small_bench):
    found = Findings(bench=small_bench)

    def raise_after_backward(twin):
        twin.forward().backward()
        raise RuntimeError("in the middle of a step")

    with twins(small_bench, ["none"], found) as made:
        (twin,) = made.values()
        assert twin.measured(found, "a step", raise_after_backward, twin) is None
        assert all(parameter.grad is None for parameter in twin.model.parameters())
    assert found.rows[0].summary == "it raises RuntimeError: in the middle of a step"


def test_a_peers_model_is_gone_before_the_next_one_runs_in_its_process(small_bench, monkeypatch):
    live = []

    def output_of(arguments, **settings) -> str:
        live.append(simdevice.stats().live_bytes)
        assert read_work(arguments[-1]) == small_bench.work, "the same steps as in this process"
        assert settings["folder"] == small_bench.folder
        assert 0 < settings["timeout"] <= 100
        return '[{"after_forward": 1, "peak": 1, "leftover": 0}, [1.0]]'

    def enter(model):
        object.__setattr__(model, "itself", model)  # a cycle, which only the collector frees
        return contextlib.nullcontext()

    monkeypatch.setitem(peers.PEERS, "one", peers.Peer(package="torch", enter=enter))
    monkeypatch.setattr(peers, "output_of", output_of)
    gc.collect()
    before = simdevice.stats().live_bytes
    gc.disable()
    try:
        for name in ("one", "transformers' flag, TRL's offload"):
            peers._peer_row(small_bench, name, peers.PEERS[name])
    finally:
        gc.enable()
    assert live == [before]
