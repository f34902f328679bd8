"""For the same budget, no uniform policy is faster than the plan: models, lengths and accelerators in many pairs."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from lowtide.hardware.accelerators import find_accelerator, margins_for
from lowtide.planning.planner import _Limits, _Planner
from lowtide.simulation.simulator import Simulator
from lowtide.targets.job import Job
from lowtide.targets.target import find_target
from support import needs_transformers_5

if TYPE_CHECKING:
    from lowtide.simulation.estimate import Estimate
    from lowtide.simulation.region_costs import StepCosts

pytestmark = needs_transformers_5

CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (
        transformers.LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=32000,
        ),
        {"lora": 16},
    ),
    "qwen3": (
        transformers.Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=64000,
        ),
        {},
    ),
    "mixtral": (
        transformers.MixtralConfig(
            hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=16, vocab_size=32000
        ),
        {"engine": "ddp", "ranks": 4},
    ),
}
CASES = list(itertools.product(CONFIGS, (4096, 16384), ("H100", "L40S", "RTX 4090", "T4")))
QUICK = [("llama", 4096, "L40S"), ("qwen3", 16384, "H100")]


class InThisProcess:
    """A simulator for a planner that asks from several threads."""

    warning = None

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._lock = threading.Lock()
        self.summary = simulator.summary

    def estimate(self, policy: str, *, exact: bool) -> Estimate:
        with self._lock:
            return self._simulator.estimate(policy, exact=exact)

    def costs(self, tile: str, policies: tuple[str, ...]) -> StepCosts:
        with self._lock:
            return self._simulator.costs(tile, policies)

    def stop(self) -> None:
        raise AssertionError("nothing should go wrong here")


@pytest.mark.parametrize(
    ("name", "tokens", "device"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_no_uniform_policy_is_faster_than_the_plan(name: str, tokens: int, device: str):
    config, settings = CONFIGS[name]
    job = Job(tokens=tokens, dtype="fp16", **settings)
    card = find_accelerator(device)
    simulator = InThisProcess(Simulator(find_target(config), job, card))
    least, most = (simulator.estimate(policy, exact=False) for policy in ("recompute+offload+tile", "none"))
    margin = margins_for(card, job.ranks).total
    budget = margin + (least.needed_bytes + most.needed_bytes) // 2
    limits = _Limits(*card.budgets(budget, None), margins_for(card, job.ranks), headroom=0.0)
    plan = _Planner(simulator, job, card, limits, exact=False, progress=None, tell=None).plan_all()
    assert plan.fastest is not None
    assert plan.fastest.estimate.exact
    assert plan.fastest.device_bytes <= budget
    for candidate in plan.candidates:
        assert not candidate.fits or candidate.estimate.seconds >= plan.fastest.estimate.seconds * (1 - 1e-9), (
            candidate.policy
        )
    assert ";" in plan.fastest.policy or plan.fastest.policy == plan.candidates[0].policy, (
        "half of the way, a mixture helps"
    )
