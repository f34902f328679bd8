"""An applied model under real DistributedDataParallel: the gradients of one process on the joined batch."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import simdevice
from models.shared_block import batch, model
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks, with_backend


def enable_sim() -> str:
    simdevice.enable(on_violation="raise")
    return "cpu:gloo,sim:sim_gloo"


def gradients(rank: int, device: str, policy: str, options: dict) -> dict:
    net = model().to(device)
    if not options.get("find_unused_parameters"):
        net.unused.requires_grad_(False)
    applied = lowtide.apply(net, policy)
    ddp = DistributedDataParallel(net, **options)
    for _ in range(2):
        ddp.zero_grad()
        ddp(batch(rank).to(device)).square().mean().backward()
    report = applied.report()
    assert all(region.recomputes == region.forwards > 0 for region in report.regions)
    if "offload" in policy:
        assert sum(region.packed_bytes for region in report.regions) > 0
    return to_numpy(net)


on_cpu = gradients


@with_backend(enable_sim)
def on_sim(rank: int, policy: str, options: dict) -> dict:
    return gradients(rank, "sim", policy, options)


OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_gradients_are_those_of_the_joined_batch(sim, device, options):
    if device == "cpu":
        per_rank = run_ranks(on_cpu, "cpu", "recompute", options)
    else:
        per_rank = run_ranks(on_sim, "recompute+offload", options)
    reference = model()
    sum(reference(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
    assert_joined(per_rank, reference, leave_out=["unused"])
