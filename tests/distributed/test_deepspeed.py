"""An applied model in DeepSpeed's engine, ZeRO-1, -2 and -3: the weights of plain training in one process.

DeepSpeed hides gradients, so the weights after two optimizer steps are compared. Policies that offload run on the
emulated device, the others on the CPU. The ranks' sequences differ in length, and with stage 3 and LoRA most weights
are frozen (transformers#47254). `make test` runs a covering subset, `make test-all` everything.
"""

from __future__ import annotations

import importlib.util
import itertools
import re

import pytest
import torch
from torch import nn

import lowtide
from lowtide import simdevice
from lowtide.errors import InvalidValueError
from models.adapted import ADAPTATIONS, MODELS, batch, make
from models.routed import Routed
from support.deepspeed_on_sim import RATE, initialize, use_cpu, use_sim
from support.foreign_warnings import ignore_warnings_of
from support.launcher import run_ranks, with_backend
from support.pairs import marked

pytestmark = [
    ignore_warnings_of("deepspeed", "peft", "torch", "transformers"),
    pytest.mark.timeout(900),
    # not imported here: that has effects on the whole process
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the deepspeed extra is not installed"),
]

STEPS = 2
POLICIES = [
    "recompute",
    "recompute+offload",
    "recompute+tile(mlp, tokens=7)",
    "recompute+tile(loss, loss_tokens=7)",
    "recompute(keep=attention)",
    "recompute(keep=attention)+offload+tile(tokens=7, loss_tokens=7)",
]


def single(name: str, rank: int, step: int, device: str = "cpu") -> dict:
    inputs = batch(name, rank, step)
    return {k: (v.float() if v.is_floating_point() else v).to(device) for k, v in inputs.items()}


def train(rank: int, device: str, stage: int, policy: str, adaptation: str, name: str) -> dict:
    import deepspeed

    model = make(name, adaptation, device).float()
    applied = lowtide.apply(model, policy)
    engine = initialize(model, stage)
    for step in range(STEPS):
        engine.backward(engine(**single(name, rank, step, device), use_cache=False).loss)
        engine.step()
    report = applied.report()
    assert all(region.recomputes == region.forwards >= STEPS for region in report.regions)
    if "tile" in policy:
        assert any(tiled.tiles > tiled.calls for tiled in report.tiles)
    if "tile(tokens" in policy and name != "t5":  # whose blocks have a position bias
        names = [region.name for region in report.regions if "visual" not in region.name]
        blocks = [tiled for tiled in report.tiles if tiled.name in names]
        assert len(blocks) == len(names)
        assert all(tiled.tiles > tiled.calls and not tiled.left_alone for tiled in blocks)
    if "offload" in policy:
        assert sum(region.packed_bytes for region in report.regions) > 0
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {n: p.detach().cpu().clone().numpy() for n, p in model.named_parameters() if p.requires_grad}


def train_on_cpu(rank: int, *case) -> dict:
    use_cpu()
    return train(rank, "cpu", *case)


def enable_sim() -> str:
    simdevice.enable(on_violation="raise")
    return "cpu:gloo,sim:sim_gloo"


@with_backend(enable_sim)
def train_on_sim(rank: int, *case) -> dict:
    use_sim()
    return train(rank, "sim", *case)


def plain(adaptation: str, name: str) -> dict:
    model = make(name, adaptation).float()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(**single(name, rank, step), use_cache=False).loss / 2).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def check(stage: int, policy: str, adaptation: str, name: str) -> None:
    function = train_on_sim if "offload" in policy else train_on_cpu
    per_rank = run_ranks(function, stage, policy, adaptation, name, timeout=600)
    start = {n: p.detach() for n, p in make(name, adaptation).float().named_parameters()}
    for weights in per_rank:
        for parameter, expected in plain(adaptation, name).items():
            moved = (expected - start[parameter]).norm()
            assert (torch.from_numpy(weights[parameter]) - expected).norm() <= 1e-3 * moved + 1e-7, parameter


EVERYTHING = list(itertools.product([1, 2, 3], POLICIES, ADAPTATIONS, MODELS))
A_LEAF = (3, "recompute+tile(mlp, tokens=7)", "full", "mixtral")  # DeepSpeed gathers a mixture of experts as a whole


@pytest.mark.parametrize(("stage", "policy", "adaptation", "name"), marked(EVERYTHING, A_LEAF))
def test_weights_are_those_of_plain_training(stage, policy, adaptation, name):
    check(stage, policy, adaptation, name)


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        experts = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
        self.moe = Routed(16, experts).float()

    def forward(self, x):
        return x + self.moe(x)[0]


def tile_listed_experts(rank: int, leaf: bool) -> str:
    """What is said of a mixture of experts that DeepSpeed gathers expert by expert, or as a whole."""
    use_cpu()
    import deepspeed

    torch.manual_seed(0)
    first = nn.Linear(16, 16)  # a leaf of DeepSpeed's fails with inputs that need no gradient
    model = nn.Sequential(first, RoutedBlock(), RoutedBlock())
    lowtide.apply(model, "recompute+tile(mlp, tokens=7)")
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [Routed])
    engine = initialize(model, 3)
    try:
        engine.backward(engine(torch.randn(1, 20, 16)).square().mean())
    except InvalidValueError as error:
        return str(error)
    return "tiled"


def test_experts_that_are_gathered_one_by_one_are_refused_and_as_a_whole_they_are_tiled():
    """Ranks that need other experts in a tile would wait for each other, or take one expert's weights for another's."""
    remedy = r"set_z3_leaf_modules\(model, \[Routed\]\)"
    for said in run_ranks(tile_listed_experts, False):
        assert re.search(rf"1\.moe \(Routed\) cannot be tiled under ZeRO-3.*{remedy}", said)
    assert run_ranks(tile_listed_experts, True) == ["tiled", "tiled"]
