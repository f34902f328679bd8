"""An applied model in DeepSpeed's engine, ZeRO-1, -2 and -3: the weights of plain training in one process.

DeepSpeed hides gradients, so the weights after two optimizer steps are compared.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from adapted_models import batch, make
from launcher import run_ranks

import lowtide

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
    # not imported here: that has effects on the whole process
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the deepspeed extra is not installed"),
]

STEPS, RATE = 2, 0.5
POLICIES = ["recompute", "recompute+tile(mlp, tokens=7)", "recompute+tile(tokens=7, loss_tokens=7)"]


def train(rank: int, stage: int, policy: str, adaptation: str, name: str) -> dict:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    model = make(name, adaptation).float()
    applied = lowtide.apply(model, policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    for step in range(STEPS):
        inputs = {k: v.float() if v.is_floating_point() else v for k, v in batch(name, rank, step).items()}
        engine.backward(engine(**inputs, use_cache=False).loss)
        engine.step()
    report = applied.report()
    assert all(region.recomputes == region.forwards == STEPS for region in report.regions)
    if "tile" in policy:
        assert any(tiled.tiles > tiled.calls for tiled in report.tiles)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {n: p.detach().clone().numpy() for n, p in model.named_parameters() if p.requires_grad}


def plain(adaptation: str, name: str) -> dict:
    model = make(name, adaptation).float()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            inputs = {k: v.float() if v.is_floating_point() else v for k, v in batch(name, rank, step).items()}
            (model(**inputs, use_cache=False).loss / 2).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("adaptation", ["full", "lora, frozen embeddings"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_those_of_plain_training(stage, adaptation, policy):
    """Stage 3 with frozen weights: transformers#47254. The ranks' sequences differ in length."""
    per_rank = run_ranks(train, stage, policy, adaptation, "llama", timeout=600)
    start = {n: p.detach() for n, p in make("llama", adaptation).float().named_parameters()}
    for weights in per_rank:
        for name, expected in plain(adaptation, "llama").items():
            moved = (expected - start[name]).norm()
            assert (torch.from_numpy(weights[name]) - expected).norm() <= 1e-3 * moved + 1e-7, name
