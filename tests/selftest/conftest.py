"""What tests of the self-test share: a bench with small work on the emulated device, and a planner in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import pytest

from lowtide.selftest import bench as benches
from lowtide.selftest import frees, overlaps, plans, right
from lowtide.simulation.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.selftest.bench import Bench


class SimulatorHere(contextlib.nullcontext):
    """Simulates in this process, so that a broken engine is also what is simulated."""

    def __init__(self, target, job, accelerator):
        super().__init__(self)
        self.opening = (target, job)
        self.change_accelerator(accelerator)

    def change_accelerator(self, accelerator):
        self.simulator = Simulator(*self.opening, accelerator)

    def estimate(self, policy, *, exact):
        return self.simulator.estimate(policy, exact=exact)


CASES = [
    right.Case("llama", right.POLICIES[1], "fp32"),
    right.Case("llama", right.POLICIES[3], "fp32"),
]
POLICIES = ("none", "recompute", "recompute+offload")


@pytest.fixture
def small_bench(sim: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(plans, "SimulatorProcess", SimulatorHere)
    monkeypatch.setattr(right, "cases", lambda **_: CASES)
    for stage in (frees, overlaps, plans):
        monkeypatch.setattr(stage, "POLICIES", POLICIES)
    with benches.open_bench(sim, quick=True) as bench:
        work = dataclasses.replace(bench.work, hidden=64, heads=2, layers=3, tokens=256, vocabulary=128, stresses=1)
        yield dataclasses.replace(bench, work=work)
