"""Tensor parallelism: two real ranks under transformers' own plan beside the simulated one, and what is refused."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import transformers

import lowtide
from lowtide.errors import InvalidValueError, PlanError
from lowtide.hardware.accelerators import Rates, find_accelerator
from lowtide.policy import Policy
from lowtide.recording import read_peak
from lowtide.simulation.attention import Attention
from lowtide.simulation.clock import DEVICE, Clock
from lowtide.simulation.device import simulated_device
from lowtide.simulation.ledger import Ledger
from lowtide.simulation.simulator import Simulator
from lowtide.simulation.step import Recording, record
from lowtide.targets.job import Job, make_job
from lowtide.targets.target import find_target
from models.planned import TOKENS, batch_maker, make_model
from support import needs_transformers_5
from support.launcher import run_ranks, with_backend

pytestmark = needs_transformers_5

FLOAT = torch.float32
L40S = find_accelerator("L40S")
CONFIG = transformers.LlamaConfig(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=4000,
    use_cache=False,
)
CASES = {
    "llama": ("none", "recompute(keep=attention)+tile(mlp, tokens=64)"),
    "qwen3": ("recompute+tile(attention, tokens=64)",),
    "mixtral": ("recompute",),
}


def _divided(family: str) -> tuple[Any, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    torch.manual_seed(0)
    model = make_model(family, FLOAT, lora=False, device="cpu")
    apply_tensor_parallelism(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return model.train(), batch_maker(family, FLOAT)(model, "cpu")


def _use_fake_ranks() -> str:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    return "fake"


@with_backend(_use_fake_ranks)
def _real_peaks(_rank: int, family: str) -> dict[str, int]:
    from support.real_ranks import measured_peak

    model, batch = _divided(family)
    return {policy: measured_peak(model, batch, policy) for policy in CASES[family]}


def _real_exchanges(_rank: int, family: str, policies: tuple[str, ...]) -> list[dict[str, int]]:
    from support.real_ranks import counted_exchanges

    model, batch = _divided(family)
    return [counted_exchanges(model, batch, policy) for policy in policies]


def _simulated(family: str, policy: str, **job: object) -> Recording:
    model = make_model(family, FLOAT, lora=False, device="meta")
    attention = Attention("cpu")
    ledger = Ledger(Clock(), Rates(flops=1e12, single_flops=1e12, bandwidth=1e11), DEVICE, rounding=1)
    with simulated_device(ledger.clock, attention):
        settings = {"tokens": TOKENS, "optimizer": "sgd", "tp": 2, "ranks": 2, **job}
        return record(model, batch_maker(family, FLOAT), Job(**settings), Policy.parse(policy), ledger, attention)


@pytest.mark.parametrize("family", CASES)
def test_peak_is_that_of_a_real_rank(family: str):
    real = run_ranks(_real_peaks, family)[0]
    for policy, peak in real.items():
        assert read_peak(_simulated(family, policy)).nbytes == pytest.approx(peak, rel=0.01), policy


@pytest.mark.parametrize("family", CASES)
def test_exchanges_are_those_of_real_ranks(family: str):
    policies = ("none", "recompute")
    for results in run_ranks(_real_exchanges, family, policies):
        for policy, exchanges in zip(policies, results, strict=True):
            counted: collections.Counter[str] = collections.Counter()
            for kind, figures in _simulated(family, policy).traffic.items():
                counted[kind.partition(" ")[2]] += figures["count"]
            assert counted == exchanges, policy


def test_exchanges_are_counted_by_phase_and_in_bytes():
    recording = _simulated("llama", "recompute")
    hidden, logits = TOKENS * 192 * 4, TOKENS * 2048 * 4
    layers, backward = 3, 6
    assert recording.traffic == {
        "forward all_reduce": {"count": 1 + 2 * layers, "bytes": (1 + 2 * layers) * hidden},
        "forward all_gather": {"count": 1, "bytes": logits // 2},
        "backward all_reduce": {"count": 1 + backward * layers, "bytes": (1 + backward * layers) * hidden},
    }, "queries, keys, values, gate and up sum their input's gradient; attention's output is summed again"


def _estimate(policy: str = "recompute", *, exact: bool = True, **job: object):
    settings = make_job(**{"tokens": 4096, "images": None, "engine": None, "ranks": None, **job})
    return Simulator(find_target(CONFIG), settings, L40S).estimate(policy, exact=exact)


def test_weights_states_and_activations_are_divided():
    whole, half = (_estimate("none", tp=tp) for tp in (1, 2))
    assert half.owners["weights"] == pytest.approx(whole.owners["weights"] / 2, rel=0.01), "norms alone stay whole"
    assert half.owners["optimizer"] == pytest.approx(whole.owners["optimizer"] / 2, rel=0.01)
    assert whole.owners["saved"] / 2 < half.owners["saved"] < 0.8 * whole.owners["saved"], "norms' inputs stay whole"
    assert half.busy["attention"] == pytest.approx(whole.busy["attention"] / 2, rel=0.01)
    assert half.busy["matmul"] < 0.7 * whole.busy["matmul"], "narrower products are bound by memory"
    assert half.busy["network"] > 0
    assert not whole.traffic


def test_a_slower_network_makes_a_slower_step():
    import dataclasses

    job = make_job(tokens=4096, images=None, engine=None, ranks=None, tp=2)
    fast, slow = (
        Simulator(find_target(CONFIG), job, dataclasses.replace(L40S, network=L40S.network / factor)).estimate(
            "recompute", exact=True
        )
        for factor in (1, 10)
    )
    assert slow.seconds - fast.seconds == pytest.approx(9 * fast.busy["network"], rel=0.01)


def test_extrapolated_is_the_same_as_simulated_whole():
    carried, exact = (_estimate(exact=exact, tp=4) for exact in (False, True))
    assert (carried.exact, exact.exact) == (False, True)
    assert carried.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.005)
    assert carried.seconds == pytest.approx(exact.seconds, rel=0.02)
    assert carried.traffic == exact.traffic


def test_other_ranks_have_other_batches():
    alone, sharded = _estimate(tp=2), _estimate(tp=2, ranks=8, engine="fsdp2")
    assert sharded.owners["weights"] == pytest.approx(alone.owners["weights"] / 4, rel=0.02)
    assert sharded.traffic == alone.traffic
    doubled = _estimate(tp=2, ranks=4)
    assert doubled.owners["communication"] == pytest.approx(alone.owners["weights"], rel=0.01), "ddp's buckets"


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        (CONFIG, 3, "LlamaForCausalLM has 8 attention heads, which cannot be divided among 3 ranks"),
        (CONFIG, 8, "has 4 key value heads, which cannot be divided among 8 ranks"),
        (transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4), 2, "GPT2LMHeadModel has no plan that says how"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(config: object, tp: int, message: str):
    with pytest.raises(PlanError, match=message):
        Simulator(find_target(config), Job(tokens=8, tp=tp, ranks=tp), L40S)


def test_an_unknown_style_is_refused():
    config = transformers.LlamaConfig(**{**CONFIG.to_dict(), "base_model_tp_plan": None})
    config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "diagonal"}
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(PlanError, match=r"not modelled: \['diagonal'\]"):
        lowtide.plan(model, tokens=64, device="L40S", policy="recompute", tp=2, cache=False)


def test_a_divided_head_has_no_tiles():
    simulator = Simulator(find_target(CONFIG), Job(tokens=512, tp=2, ranks=2), L40S)
    assert simulator.summary.tile_options == ["", "tile(mlp)", "tile(attention, mlp)"]
    with pytest.raises(InvalidValueError, match=r"divides its head 'lm_head' among the ranks"):
        simulator.estimate("recompute+tile(loss)", exact=True)
