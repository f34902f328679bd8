"""An engine that is broken in one way is caught by the stage that is about it, and by no other."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowtide import simdevice
from lowtide.auditing.result import Verdict
from lowtide.selftest import STAGES, overlaps, plans
from lowtide.stores import host
from lowtide.tiling import assembly

JUDGING = ("right", "frees", "overlaps", "plans")


def copies_on_the_compute_stream(monkeypatch):
    def on(self, device):
        current = torch.accelerator.current_stream(device)
        return host.CopyStreams(h2d=current, d2h=current)

    monkeypatch.setattr(host.CopyStreamCache, "on", on)


def a_missing_wait(monkeypatch):
    monkeypatch.setattr(host.StreamWaits, "wait", lambda *_: None)


def memory_that_is_not_given_back(monkeypatch):
    kept, finish = [], host.HostStored._finish_fetch

    def keep(self):
        raw = finish(self)
        if raw.device.type == "sim":
            kept.append(raw)
        return raw

    monkeypatch.setattr(host.HostStored, "_finish_fetch", keep)


def a_plan_that_is_ten_percent_off(monkeypatch):
    real = plans.SimulatorProcess.estimate

    def estimate(self, policy, *, exact):
        found = real(self, policy, exact=exact)
        return dataclasses.replace(found, peak_bytes=round(found.peak_bytes * 1.1))

    monkeypatch.setattr(plans.SimulatorProcess, "estimate", estimate)


def a_tile_that_drops_a_gradient(monkeypatch):
    real = assembly._Output.split_gradient

    def split(self, gradient):
        *parts, last = real(self, gradient)
        return [*parts, torch.zeros_like(last)]

    monkeypatch.setattr(assembly._Output, "split_gradient", split)


def a_slow_link(_monkeypatch):
    simdevice.enable(h2d=2e7, d2h=2e7)


FAULTS = {
    copies_on_the_compute_stream: "overlaps",
    a_missing_wait: "right",
    memory_that_is_not_given_back: "frees",
    a_plan_that_is_ten_percent_off: "plans",
    a_tile_that_drops_a_gradient: "right",
    a_slow_link: "overlaps",
}

SHOWS = {
    copies_on_the_compute_stream: "of copies, at least 50% expected",
    a_missing_wait: "streams that are late: 1 steps have wrong gradients",
    memory_that_is_not_given_back: "are left after the step",
    a_plan_that_is_ten_percent_off: "peaks must agree within 5%",
    a_tile_that_drops_a_gradient: "gradients are wrong",
    a_slow_link: "20% of the data sheet's, at least 50% expected",
}
"""What one of the failing rows says."""


def failing_stages(bench) -> dict[str, list[str]]:
    found = {name: STAGES[name](bench) for name in JUDGING}
    simdevice.reset()
    return {
        name: [f"{row.name}: {row.summary}" for row in stage.failures]
        for name, stage in found.items()
        if stage.verdict is not Verdict.PASS
    }


def test_copies_on_the_compute_stream_show_in_the_trace(small_bench, monkeypatch):
    copies_on_the_compute_stream(monkeypatch)
    (row,) = (row for row in overlaps.run(small_bench).rows if row.name == overlaps.TRACE)
    assert (row.verdict, row.grade, row.figures["on_side_streams"]) == ("fail", "no-effect", 0)


def test_a_right_engine_passes(small_bench):
    assert failing_stages(small_bench) == {}


@pytest.mark.parametrize("break_it", FAULTS, ids=lambda fault: fault.__name__)
def test_a_broken_engine_is_caught_by_one_stage(small_bench, monkeypatch, break_it):
    break_it(monkeypatch)
    failing = failing_stages(small_bench)
    assert list(failing) == [FAULTS[break_it]], failing
    assert any(SHOWS[break_it] in row for row in failing[FAULTS[break_it]]), failing
