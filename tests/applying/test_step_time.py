"""Step time on the emulated device's clock, side by side with peers in one test: exact figures, no stopwatch."""

from __future__ import annotations

import inspect

import pytest
import torch

import lowtide
from lowtide import simdevice
from models.tiny import transformers
from support import ignore_dropped_caches, needs_trl_on_any_device
from support.foreign_warnings import ignore_warnings_of

HAS_OWN_OFFLOAD = "offload" in inspect.signature(transformers.PreTrainedModel.gradient_checkpointing_enable).parameters

pytestmark = [ignore_warnings_of("torch", "transformers", "trl"), ignore_dropped_caches]

TOKENS, WIDTH, LAYERS = 256, 64, 8
BOUNDARY = TOKENS * WIDTH * 4


def build():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=172,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to("sim").train()


def measure(model, context=None):
    """The second step's figures: the first one warms up."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 128, (1, TOKENS)).to("sim")
    for _ in range(2):
        model.zero_grad()
        torch.accelerator.synchronize()
        simdevice.reset()
        base = simdevice.stats().live_bytes
        with context or torch.enable_grad():
            loss = model(input_ids=tokens, labels=tokens).loss
        torch.accelerator.synchronize()
        after_forward = simdevice.stats().live_bytes - base
        loss.backward()
        torch.accelerator.synchronize()
        del loss
    assert simdevice.violations() == []
    return simdevice.stats(), after_forward


def ours(policy):
    model = build()
    with lowtide.apply(model, policy):
        return measure(model)


def transformers_offload():
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
    return measure(model)


def trl_offload():
    from trl.models.activation_offloading import OffloadActivations

    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return measure(model, OffloadActivations())


@pytest.fixture
def balanced(sim) -> str:
    """A layer's compute takes about five times as long as the copy of its input."""
    simdevice.enable(flops=1e11, bandwidth=1e11, h2d=2e8, d2h=2e8, launch=1e-7)
    return sim


def test_offload_costs_next_to_nothing(balanced):
    recompute, left_by_recompute = ours("recompute")
    offload, left_by_offload = ours("recompute+offload")
    assert offload.d2h_bytes >= (LAYERS - 1) * BOUNDARY, "it really offloads"
    assert offload.time <= 1.02 * recompute.time
    assert left_by_recompute - left_by_offload >= 0.99 * (LAYERS - 1) * BOUNDARY


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(
            transformers_offload,
            marks=pytest.mark.skipif(not HAS_OWN_OFFLOAD, reason="this version of transformers has no offload option"),
        ),
        pytest.param(trl_offload, marks=needs_trl_on_any_device),
    ],
)
def test_no_peer_is_faster(balanced, peer):
    offload, _ = ours("recompute+offload")
    theirs, _ = peer()
    assert all(stats.d2h_bytes >= (LAYERS - 1) * BOUNDARY for stats in (offload, theirs)), "both really offload"
    assert offload.time <= theirs.time


@needs_trl_on_any_device
def test_offload_without_recompute_is_as_fast_as_trl_in_less_memory(balanced):
    """Within a percent: a tensor that is saved again after it left is copied again, because it may have changed."""
    from trl.models.activation_offloading import OffloadActivations

    mine, _ = ours("offload")
    theirs, _ = measure(build(), OffloadActivations())
    assert mine.d2h_bytes > LAYERS * BOUNDARY
    assert mine.time <= 1.01 * theirs.time
    assert mine.peak_bytes < theirs.peak_bytes


def test_time_waited_is_reported(balanced):
    simdevice.enable(h2d=1e6, d2h=1e6)
    model = build()
    with lowtide.apply(model, "recompute+offload") as applied:
        stats, _ = measure(model)
        waited = applied.report().seconds_waited
    assert waited > 0.5 * stats.time, "on a link this slow, compute mostly waits"
    assert "compute waited" in str(applied.report())
