"""Tiles under real DistributedDataParallel, with other numbers of tiles on each rank."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from models.tiled import batch, model
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks

STEPS = 2


def gradients(rank: int, form: dict, options: dict, region: str) -> dict:
    net = model(**form).tile(5)
    if region:
        import lowtide

        lowtide.apply(net, region, regions=["layers.*"])
    ddp = DistributedDataParallel(net, **options)
    for step in range(STEPS):  # accumulated: only the last one talks
        with ddp.no_sync() if step + 1 < STEPS and not options.get("static_graph") else contextlib.nullcontext():
            ddp(batch(rank, step)).backward()
    chosen = [p.grad is not None and bool(p.grad.abs().max() > 0) for p in net.parameters()]
    assert any(chosen)
    return to_numpy(net)


def reference(form: dict):
    net = model(**form)
    for step in range(STEPS):
        sum(net(batch(rank, step)) / 2 for rank in range(2)).backward()
    return net


OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("region", ["", "recompute"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(options, region):
    assert_joined(run_ranks(gradients, {}, options, region), reference({}), tolerance=1e-12)


@pytest.mark.parametrize("region", ["", "recompute"])
def test_experts_that_one_rank_never_uses(region):
    form = {"routed": True, "unused_expert": True}
    per_rank = run_ranks(gradients, form, {"find_unused_parameters": True}, region)
    expected = reference(form)
    assert_joined(per_rank, expected, tolerance=1e-12)
    unused = [name for name, p in expected.named_parameters() if p.grad is None]
    assert any("experts.2" in name for name in unused), "nobody uses it"
    with torch.no_grad():
        assert expected.layers[0].mlp.experts[0].up.weight.grad.abs().max() > 0
        assert expected.layers[0].mlp.experts[1].up.weight.grad.abs().max() > 0
