"""Context parallelism: two real ranks in torch's own ring beside the simulated one, and what is refused."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import transformers

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
from lowtide.targets.batches import make_batch
from lowtide.targets.job import Job, make_job
from lowtide.targets.target import find_target
from support import needs_transformers_5
from support.foreign_warnings import ignore_warnings_of
from support.launcher import run_ranks, with_backend

pytestmark = [needs_transformers_5, ignore_warnings_of("torch", "transformers")]

L40S = find_accelerator("L40S")
LAYERS, HEADS, WIDTH, TOKENS = 3, 6, 32, 512
FIELDS = {
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 2048,
    "use_cache": False,
}
CONFIG = transformers.LlamaConfig(**FIELDS)
POLICIES = ("none", "recompute", "recompute(keep=attention)", "recompute+tile(mlp, tokens=64)")


def _in_ring() -> tuple[Any, dict[str, torch.Tensor]]:
    from support.ring_attention import without_masks

    torch.manual_seed(0)
    model = without_masks(transformers.LlamaForCausalLM._from_config(CONFIG, attn_implementation="sdpa"))
    ids = torch.arange(TOKENS).remainder(1000)[None]
    return model.train(), {"input_ids": ids, "labels": ids, "position_ids": torch.arange(TOKENS)[None]}


def _use_fake_ranks() -> str:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    return "fake"


@with_backend(_use_fake_ranks)
def _real_peaks(_rank: int) -> dict[str, int]:
    from support.real_ranks import measured_peak
    from support.ring_attention import in_ring, ring_attention

    model, given = _in_ring()
    with ring_attention(sums_in_float32=True), in_ring(given) as own:
        return {policy: measured_peak(model, own, policy) for policy in POLICIES[:2]}


def _real_exchanges(_rank: int) -> dict[str, dict[str, int]]:
    from support.real_ranks import counted_exchanges
    from support.ring_attention import in_ring, ring_attention

    model, given = _in_ring()
    with ring_attention(sums_in_float32=True), in_ring(given) as own:
        return {policy: counted_exchanges(model, own, policy) for policy in POLICIES}


def _simulated(policy: str, ranks: int = 2) -> Recording:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(CONFIG, attn_implementation="sdpa")
    ledger = Ledger(Clock(), Rates(flops=1e12, single_flops=1e12, bandwidth=1e11), DEVICE, rounding=1)
    job = Job(tokens=TOKENS, dtype="fp32", optimizer="sgd", cp=ranks, ranks=ranks, engine="ddp")
    attention = Attention("cpu")
    with simulated_device(ledger.clock, attention):
        return record(
            model, lambda *given: make_batch(given[0], job, given[1]), job, Policy.parse(policy), ledger, attention
        )


def test_peak_is_that_of_a_real_rank():
    """The first rank needs the most. DDP's buckets, which no real rank here has, are left out."""
    first, second = run_ranks(_real_peaks)
    for policy, real in first.items():
        peak = read_peak(_simulated(policy))
        buckets = sum(size for owner, size in peak.owners.items() if owner.kind == "communication")
        assert peak.nbytes - buckets == pytest.approx(real, rel=0.01), policy
        assert 0.95 * real < second[policy] <= real, policy


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exchanges_are_those_of_real_ranks(ranks: int):
    for real in run_ranks(_real_exchanges, ranks=ranks):
        for policy, exchanges in real.items():
            counted: collections.Counter[str] = collections.Counter()
            for kind, figures in _simulated(policy, ranks).traffic.items():
                counted[kind.partition(" ")[2]] += figures["count"]
            assert counted == exchanges, policy


def _estimate(policy: str = "recompute", *, exact: bool = True, config: Any = CONFIG, **job: object):
    settings = make_job(**{"tokens": 4096, "images": None, "engine": None, "ranks": None, "cp": 2, **job})
    return Simulator(find_target(config), settings, L40S).estimate(policy, exact=exact)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gather_in_forward_and_one_and_the_ring_of_gradients_in_backward(ranks: int):
    traffic = _estimate("none", cp=ranks).traffic
    keys_and_values = LAYERS * 2 * 4096 * HEADS * WIDTH
    gathered = keys_and_values * 2 // ranks * (ranks - 1)
    assert traffic == {
        "forward all_gather": {"count": LAYERS, "bytes": gathered},
        "backward all_gather": {"count": LAYERS, "bytes": gathered},
        "backward all_to_all": {"count": ranks * LAYERS, "bytes": keys_and_values * 4},
    }
    again = _estimate("recompute", cp=ranks).traffic
    assert again == {**traffic, "backward all_gather": {"count": 2 * LAYERS, "bytes": 2 * gathered}}
    assert _estimate("recompute(keep=attention)", cp=ranks).traffic == traffic


def test_a_rank_has_its_share():
    whole, half = (_estimate("none", cp=cp) for cp in (1, 2))
    assert half.busy["attention"] == pytest.approx(whole.busy["attention"] / 2, rel=0.01), "the ring is balanced"
    assert half.busy["attention_backward"] == pytest.approx(whole.busy["attention_backward"] / 2, rel=0.01)
    assert half.owners["saved"] == pytest.approx(whole.owners["saved"] / 2, rel=0.05)
    assert half.busy["network"] > 0


def test_extrapolated_is_the_same_as_simulated_whole():
    config = transformers.LlamaConfig(**{**FIELDS, "num_hidden_layers": 8})
    carried, exact = (_estimate(exact=exact, config=config, cp=4) for exact in (False, True))
    assert carried.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.005)
    assert carried.traffic == exact.traffic


def test_weights_are_sharded_over_all_ranks_of_a_sequence():
    plain, sharded = (_estimate(engine=engine) for engine in ("ddp", "fsdp2"))
    assert sharded.owners["weights"] == pytest.approx(plain.owners["weights"] / 2, rel=0.02)


def test_torchs_attention_is_put_back():
    before = torch.nn.functional.scaled_dot_product_attention
    for _ in range(2):
        _estimate()
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_attention_has_no_tiles():
    simulator = Simulator(find_target(CONFIG), Job(tokens=64, cp=2, ranks=2, engine="ddp"), L40S)
    assert simulator.summary.tile_options == ["", "tile(loss)", "tile(mlp, loss)"]
    with pytest.raises(InvalidValueError, match=r"tile\(attention\) with cp: attention reaches the tokens of other"):
        simulator.estimate("recompute+tile(attention)", exact=True)


@pytest.mark.parametrize(
    ("config", "job", "message"),
    [
        (CONFIG, {"tokens": 4098}, "cp=2: 4098 tokens cannot be divided into 4 parts"),
        (CONFIG, {"dtype": "fp32"}, r"modelled for flash attention .* 'efficient' \(torch.float32\): plan bf16"),
        (transformers.LlamaConfig(**FIELDS, attention_dropout=0.1), {}, "and this is dropout in attention"),
        (transformers.MistralConfig(**FIELDS, sliding_window=256), {}, "attends under a mask"),
        (
            transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=100),
            {},
            "is not transformers' 'sdpa'",
        ),
    ],
)
def test_what_the_ring_does_not_take_is_refused(config: Any, job: dict[str, object], message: str):
    with pytest.raises(PlanError, match=message):
        _estimate(config=config, **job)
