"""An applied model under FSDP2, sharded by layer or as a whole: the gradients of one process on the joined batch."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from models.shared_block import batch, model
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks


def sharded_gradients(rank: int, units: str) -> dict:
    net = model()
    net.unused.requires_grad_(False)
    applied = lowtide.apply(net, "recompute")
    mesh = init_device_mesh("cpu", (2,))
    if units == "layers":
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for _ in range(2):
        net.zero_grad()
        net(batch(rank)).square().mean().backward()
    assert all(region.recomputes == region.forwards > 0 for region in applied.report().regions)
    return to_numpy(net)


@pytest.mark.parametrize("units", ["layers", "root"])
def test_gradients_are_those_of_the_joined_batch(units):
    per_rank = run_ranks(sharded_gradients, units)
    reference = model()
    sum(reference(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
    assert_joined(per_rank, reference, leave_out=["unused"])
