"""What is read from a trace of torch's profiler and from times: how much of the copies is hidden."""

from __future__ import annotations

import pytest

from lowtide.selftest.findings import Findings
from lowtide.selftest.meters import StepMemory, device_events, read_memory_events
from lowtide.selftest.overlaps import OFFLOAD, _judge_hidden, quartiles, traced_row
from lowtide.selftest.steps import twins


def kernel(begin: float, end: float, stream: int = 7) -> dict:
    return {"ph": "X", "cat": "kernel", "name": "gemm", "ts": begin, "dur": end - begin, "args": {"stream": stream}}


def copy(begin: float, end: float, stream: int = 21, kind: str = "DtoH (Device -> Pinned)") -> dict:
    span = {"ts": begin, "dur": end - begin, "args": {"stream": stream}}
    return {"ph": "X", "cat": "gpu_memcpy", "name": f"Memcpy {kind}", **span}


@pytest.mark.parametrize(
    ("events", "verdict", "share"),
    [
        ([kernel(0, 10), copy(2, 6)], "pass", 1.0),
        ([kernel(0, 4), kernel(5, 10), copy(2, 6)], "pass", 0.75),
        ([kernel(0, 3), kernel(20, 30), copy(2, 6)], "fail", 0.25),
        ([kernel(0, 10), kernel(14, 20), copy(10, 14, stream=7)], "fail", 0.0),
        ([kernel(0, 10), copy(2, 6, kind="DtoD (Device -> Device)")], "inconclusive", 0.0),
        ([copy(2, 6)], "inconclusive", 0.0),
        ([kernel(0, 10), copy(2, 6), copy(2, 6, stream=22, kind="HtoD (Pinned -> Device)")], "pass", 1.0),
        ([kernel(0, 3), copy(0, 2), copy(2, 10)], "inconclusive", 0.3),
        ([kernel(0, 3), copy(3, 12, stream=7)], "fail", 0.0),
    ],
)
def test_copies_in_a_trace(events, verdict, share):
    row = traced_row(events)
    assert (row.verdict, row.figures["share"]) == (verdict, share)


def test_the_emulated_device_is_traced_as_a_gpu_is(small_bench):
    """Offload's copies run on side streams beside kernels; with all of them on one stream, none do."""
    found = Findings(bench=small_bench)
    with twins(small_bench, [OFFLOAD], found) as made:
        events = device_events(small_bench, made[OFFLOAD].step)
        begins = min(event["ts"] for event in events)
        assert all(event["dur"] >= 0 and event["ts"] >= begins for event in events)
        assert {event["cat"] for event in events} == {"kernel", "gpu_memcpy"}
        row = traced_row(events)
        assert (row.verdict, row.figures["on_side_streams"]) == ("pass", row.figures["copies"])
        assert row.figures["share"] > 0.5
        assert sum("DtoH" in event["name"] for event in events) >= 2
    one_stream = [{**event, "args": {"stream": 7}} for event in events]
    assert traced_row(one_stream).verdict == "fail"


def test_quartiles():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_bytes_are_added_up_from_a_profile_of_the_cpu():
    events = [
        {"name": "[memory]", "ts": 1, "args": {"Bytes": 100}},
        {"name": "[memory]", "ts": 4, "args": {"Bytes": 50}},
        {"name": "lowtide: after forward", "ph": "X", "ts": 3, "dur": 0},
        {"name": "[memory]", "ts": 2, "args": {"Bytes": -40}},
        {"name": "[memory]", "ts": 5, "args": {"Bytes": -110}},
    ]
    assert read_memory_events(events) == StepMemory(after_forward=60, peak=110, leftover=0)


@pytest.mark.parametrize(
    ("hidden", "noise", "copies", "kernels", "verdict"),
    [
        (0.9, 0.0, 1.0, 5.0, "pass"),
        (0.2, 0.0, 1.0, 5.0, "fail"),
        (0.2, 0.0, 9.0, 5.0, "inconclusive"),
        (0.2, 0.8, 1.0, 5.0, "inconclusive"),
        (0.9, 0.8, 1.0, 5.0, "inconclusive"),
        (0.0, 0.0, 0.0, 5.0, "fail"),
    ],
)
def test_hidden_copies_are_judged_where_they_can_be_hidden(hidden, noise, copies, kernels, verdict):
    assert _judge_hidden(hidden, noise, copies, kernels)[0] == verdict
