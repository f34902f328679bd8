"""Sequence parallelism: exchanges around attention, what a rank holds, and what is refused."""

from __future__ import annotations

import importlib.util
from unittest import mock

import pytest
import torch
import transformers

import lowtide
from lowtide.errors import InvalidValueError, PlanError
from lowtide.hardware.accelerators import find_accelerator
from lowtide.simulation.simulator import Simulator
from lowtide.targets.job import Job, make_job
from lowtide.targets.target import find_target
from support import needs_transformers_5
from support.foreign_warnings import ignore_warnings_of
from support.launcher import run_ranks

pytestmark = [needs_transformers_5, ignore_warnings_of("deepspeed", "torch", "transformers")]

L40S = find_accelerator("L40S")
TOKENS, HIDDEN, HEADS, KEY_HEADS, WIDTH, LAYERS = 4096, 512, 8, 2, 64, 6
FIELDS = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": 4000,
    "use_cache": False,
}
CONFIG = transformers.LlamaConfig(**FIELDS)


def _simulator(config: object = CONFIG, **job: object) -> Simulator:
    settings = make_job(**{"tokens": TOKENS, "images": None, "engine": None, "ranks": None, **job})
    return Simulator(find_target(config), settings, L40S)


@pytest.mark.parametrize(("ranks", "copied_heads"), [(2, 2), (4, 4), (8, 8)])
def test_every_layer_exchanges_queries_keys_values_and_outputs(ranks: int, copied_heads: int):
    """With more ranks than there are heads of keys and values, those are copied first."""
    traffic = _simulator(sp=ranks).estimate("recompute", exact=True).traffic
    heads = 2 * HEADS + 2 * max(KEY_HEADS, copied_heads)
    sent = LAYERS * heads * WIDTH * 2 * TOKENS // ranks * (ranks - 1) // ranks
    assert traffic["forward all_to_all"] == {"count": 4 * LAYERS, "bytes": sent}
    again = LAYERS * (heads - HEADS) * WIDTH * 2 * TOKENS // ranks * (ranks - 1) // ranks
    backward = traffic["backward all_to_all"]
    assert backward["count"] in (7 * LAYERS, 8 * LAYERS), "the region runs again, up to what backward needs"
    assert backward["bytes"] in (sent + again, 2 * sent)


POLICIES = ("none", "recompute", "recompute(keep=attention)")


def _real_exchanges(_rank: int) -> dict[str, tuple[int, int]]:
    """How often a rank calls torch's exchange in a step, and how many bytes of that are for the other rank."""
    from support.deepspeed_on_sim import use_cpu

    use_cpu()
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from support.real_steps import train

    deepspeed.init_distributed("gloo")
    model = transformers.LlamaForCausalLM._from_config(SMALL, attn_implementation="sdpa").train()
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1
    )
    ids, rank = torch.arange(64)[None], torch.distributed.get_rank()
    own = {name: ids.chunk(2, 1)[rank].contiguous() for name in ("input_ids", "position_ids", "shift_labels")}
    exchange, found = torch.distributed.all_to_all_single, {}
    for policy in POLICIES:
        with lowtide.apply(model, policy), mock.patch.object(torch.distributed, "all_to_all_single") as calls:
            calls.side_effect = exchange
            train(model, own | {"labels": own["shift_labels"]})
        sent = [
            {**dict(zip(("output", "input"), args, strict=False)), **named}["input"]
            for args, named in calls.call_args_list
        ]
        found[policy] = len(sent), sum(tensor.nbytes // 2 for tensor in sent)
    return found


SMALL = transformers.LlamaConfig(**{**FIELDS, "num_hidden_layers": 2, "vocab_size": 100})


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the deepspeed extra is not installed")
def test_exchanges_are_those_of_deepspeeds_ulysses():
    for real in run_ranks(_real_exchanges, timeout=300):
        for policy, exchanged in real.items():
            traffic = _simulator(SMALL, tokens=64, dtype="fp32", sp=2).estimate(policy, exact=True).traffic
            parts = [figures for kind, figures in traffic.items() if kind.endswith("all_to_all")]
            assert exchanged == tuple(sum(part[what] for part in parts) for what in ("count", "bytes")), policy
        assert [real[policy][0] for policy in POLICIES] == [16, 24, 24]


def test_a_rank_holds_its_tokens():
    whole, quarter = (_simulator(sp=sp).estimate("none", exact=True) for sp in (1, 4))
    assert quarter.owners["saved"] == pytest.approx(whole.owners["saved"] / 4, rel=0.1)
    assert quarter.busy["attention"] == pytest.approx(whole.busy["attention"] / 4, rel=0.02), "all tokens, fewer heads"
    assert quarter.owners["communication"] == pytest.approx(whole.owners["weights"], rel=0.01), "ddp's buckets"


def test_weights_are_sharded_over_all_ranks_of_a_sequence():
    plain, sharded = (_simulator(sp=4, engine=engine).estimate("recompute", exact=True) for engine in ("ddp", "zero3"))
    assert sharded.owners["weights"] == pytest.approx(plain.owners["weights"] / 4, rel=0.02)
    assert sharded.traffic == plain.traffic


def test_extrapolated_is_the_same_as_simulated_whole():
    carried, exact = (_simulator(sp=2).estimate("recompute", exact=whole) for whole in (False, True))
    assert carried.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.005)
    assert carried.traffic == exact.traffic


def test_a_slower_network_makes_a_slower_step():
    assert _simulator(sp=2).estimate("none", exact=True).busy["network"] > 0
    assert "network" not in _simulator().estimate("none", exact=True).busy


def test_attention_has_no_tiles():
    simulator = _simulator(sp=2)
    assert simulator.summary.tile_options == ["", "tile(loss)", "tile(mlp, loss)"]
    with pytest.raises(InvalidValueError, match="attention reaches the tokens of other ranks"):
        simulator.estimate("recompute+tile(attention)", exact=True)


def test_transformers_attention_is_put_back():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    _simulator(sp=2).estimate("none", exact=True)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


@pytest.mark.parametrize(
    ("config", "sp", "message"),
    [
        (CONFIG, 16, "LlamaForCausalLM has 8 attention heads, which cannot be divided among 16 ranks"),
        (
            transformers.LlamaConfig(**{**FIELDS, "hidden_size": 384, "num_attention_heads": 6, "head_dim": 64}),
            3,
            "has 2 key value heads, which can neither be divided among 3 ranks nor copied",
        ),
        (
            transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=100),
            2,
            "is not transformers' 'sdpa'",
        ),
    ],
)
def test_models_that_cannot_exchange_are_refused(config: object, sp: int, message: str):
    with pytest.raises(PlanError, match=message):
        Simulator(find_target(config), Job(tokens=48, sp=sp, ranks=sp, engine="ddp"), L40S)


def test_attention_under_a_window_is_refused():
    config = transformers.MistralConfig(**FIELDS, sliding_window=256)
    with pytest.raises(PlanError, match="attends under a mask"):
        _simulator(config, sp=2).estimate("recompute", exact=True)
