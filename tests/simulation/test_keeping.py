"""Simulated steps under `recompute(keep=attention)`: attention runs once, and what is kept is counted where it is."""

from __future__ import annotations

import functools

import pytest
import transformers

from lowtide.hardware.accelerators import find_accelerator
from lowtide.policy import Policy
from lowtide.simulation.simulator import Simulator
from lowtide.simulation.step import simulate
from lowtide.targets.batches import make_batch
from lowtide.targets.job import Job
from lowtide.targets.models import build
from lowtide.targets.target import find_target
from support import needs_transformers_5

pytestmark = needs_transformers_5

TOKENS, LAYERS, HEADS, WIDTH = 4096, 4, 8, 512
CONFIG = transformers.LlamaConfig(
    hidden_size=WIDTH,
    intermediate_size=1024,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    vocab_size=1000,
)
KEEPING = "recompute(keep=attention)"
KEPT = TOKENS * WIDTH * 2 + TOKENS * HEADS * 4
"""Bytes of a layer's attention: its output in bf16, and the row sums of its softmax in float32."""
L40S = find_accelerator("L40S")


@functools.cache
def record(policy: str, attention: str = "auto"):
    job = Job(tokens=TOKENS, attention=attention)
    model = build(find_target(CONFIG), job)
    return simulate(model, lambda model, device: make_batch(model, job, device), job, Policy.parse(policy), L40S)


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("more", ["", "+offload", "+tile(mlp, loss, tokens=1k)"])
def test_attention_runs_once_and_everything_else_twice(kernel: str, more: str):
    none, recompute, keeping = (
        record(policy, kernel).busy for policy in ("none", f"recompute{more}", f"{KEEPING}{more}")
    )
    assert recompute["attention"] == pytest.approx(2 * none["attention"])
    assert keeping["attention"] == pytest.approx(none["attention"])
    assert keeping["attention_backward"] == recompute["attention_backward"] == none["attention_backward"]
    assert keeping["matmul"] == recompute["matmul"] > none["matmul"]
    assert set(record(f"{KEEPING}{more}", kernel).kept.values()) == {1}
    assert set(record(f"recompute{more}", kernel).kept.values()) == {0}


def test_of_attention_that_is_written_out_the_last_product_is_not_run_again():
    none, recompute, keeping = (record(policy, "math").busy["matmul"] for policy in ("none", "recompute", KEEPING))
    assert none < keeping < recompute
    assert set(record(KEEPING, "math").kept.values()) == {1}


def test_what_is_kept_waits_on_the_device():
    simulator = Simulator(find_target(CONFIG), Job(tokens=TOKENS), L40S)
    for region in simulator.costs("", ("none", "recompute", KEEPING)).regions:
        recompute, keeping = region.by_policy["recompute"], region.by_policy[KEEPING]
        assert keeping.waiting - recompute.waiting == pytest.approx(KEPT, abs=2048), "the seeds of dropout, too"
        assert keeping.moved == recompute.moved == 0
        assert keeping.backward_seconds < recompute.backward_seconds
        assert keeping.forward_seconds == pytest.approx(recompute.forward_seconds)
        assert (recompute.kept, keeping.kept) == (0, 1)


def test_what_is_kept_leaves_with_the_inputs():
    recompute, keeping = record("recompute+offload"), record(f"{KEEPING}+offload")
    more = [keeping.packed[name] - recompute.packed[name] for name in keeping.packed]
    assert more[:-1] == [KEPT] * (LAYERS - 1)
    assert keeping.stored_bytes - recompute.stored_bytes >= KEPT * (LAYERS - 1)
    assert keeping.busy["to_host"] > recompute.busy["to_host"]
    assert keeping.busy["to_device"] > recompute.busy["to_device"]
