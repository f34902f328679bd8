"""Engines x policies x adaptations x models, on two real ranks with sequences of different lengths.

Gradients equal those of the plain model in one process on the joined batch. `make test` runs a covering subset, in
which every pair of values occurs; `make test-all` runs everything.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import simdevice
from models.adapted import ADAPTATIONS, MODELS, batch, make, reference
from support.foreign_warnings import ignore_warnings_of
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks, with_backend
from support.pairs import marked

pytestmark = ignore_warnings_of("peft", "torch", "transformers")

ENGINES = {
    "ddp": {},
    "ddp, find_unused_parameters": {"find_unused_parameters": True},
    "ddp, static_graph": {"static_graph": True},
    "ddp, gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "fsdp2, layers": {},
    "fsdp2, root": {},
}
POLICIES = [
    "recompute",
    "recompute(keep=attention)",
    "recompute+tile(mlp, tokens=7)",
    "recompute+tile(loss, loss_tokens=7)",
    "recompute+tile(tokens=7, loss_tokens=7)",
    "tile(tokens=7, loss_tokens=7)",
]
STEPS = 2
TOLERANCE = 2e-6  # transformers makes losses and routes in single precision


def wrapped(engine: str, model, device: str):
    if engine.startswith("ddp"):
        return DistributedDataParallel(model, **ENGINES[engine])
    mesh = init_device_mesh(device, (2,))
    if engine == "fsdp2, layers":
        for region in lowtide.regions.find_regions(model):
            fully_shard(region.module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(rank: int, engine: str, policy: str, adaptation: str, name: str, device: str = "cpu") -> dict:
    model = make(name, adaptation, device)
    applied = lowtide.apply(model, policy)
    parallel = wrapped(engine, model, device)
    for step in range(STEPS):  # accumulated; under DDP, only the last one talks
        quiet = step + 1 < STEPS and engine.startswith("ddp") and "static" not in engine
        inputs = {key: value.to(device) for key, value in batch(name, rank, step).items()}
        with parallel.no_sync() if quiet else contextlib.nullcontext():
            parallel(**inputs, use_cache=False).loss.backward()
    report = applied.report()
    trained = [region for region in report.regions if region.forwards]
    if "recompute" in policy:
        assert all(region.recomputes == region.forwards for region in trained)
    if "keep" in policy:
        ledgers = [region.ledger for region in applied._guard.regions if region.ledger.forwards]
        assert all(ledger.recalled_outputs == ledger.kept_outputs > 0 for ledger in ledgers)
    if "tile" in policy:
        assert any(tiled.tiles > tiled.calls for tiled in report.tiles)
    if "tile(tokens" in policy and name != "t5":  # whose blocks have a position bias
        names = [region.name for region in report.regions if "visual" not in region.name]
        blocks = [tiled for tiled in report.tiles if tiled.name in names]
        assert len(blocks) == len(names)
        assert all(tiled.tiles > tiled.calls and not tiled.left_alone for tiled in blocks)
    if "offload" in policy:
        assert sum(region.packed_bytes for region in trained) > 0
    return to_numpy(model)


def check(per_rank: list[dict], adaptation: str, name: str) -> None:
    expected = reference(name, adaptation, STEPS)
    assert_joined(per_rank, expected, tolerance=TOLERANCE)
    assert per_rank[0].keys() == {n for n, p in expected.named_parameters() if p.grad is not None}


EVERYTHING = list(itertools.product(ENGINES, POLICIES, ADAPTATIONS, MODELS))


@pytest.mark.parametrize(("engine", "policy", "adaptation", "name"), marked(EVERYTHING))
def test_gradients_are_those_of_the_joined_batch(engine, policy, adaptation, name):
    check(run_ranks(train, engine, policy, adaptation, name), adaptation, name)


def enable_sim() -> str:
    simdevice.enable(on_violation="raise")
    return "cpu:gloo,sim:sim_gloo"


@with_backend(enable_sim)
def train_on_sim(rank: int, *case: str) -> dict:
    return train(rank, *case, device="sim")


OFFLOADED = list(
    itertools.product(
        ["ddp", "ddp, find_unused_parameters", "fsdp2, layers", "fsdp2, root"],
        ["recompute+offload", "recompute(keep=attention)+offload+tile(tokens=7, loss_tokens=7)"],
        ADAPTATIONS,
        MODELS,
    )
)


@pytest.mark.parametrize(("engine", "policy", "adaptation", "name"), marked(OFFLOADED))
def test_with_offload_on_the_emulated_device(engine, policy, adaptation, name):
    check(run_ranks(train_on_sim, engine, policy, adaptation, name), adaptation, name)
