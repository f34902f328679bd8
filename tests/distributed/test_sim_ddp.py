"""DistributedDataParallel with the model on the emulated device: collectives are staged through the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide import simdevice
from support.launcher import run_ranks, with_backend


def enable_sim() -> str:
    simdevice.enable(on_violation="raise")
    return "cpu:gloo,sim:sim_gloo"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch(rank: int) -> torch.Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(5, 8)


@with_backend(enable_sim)
def ddp_gradients(rank: int, options: dict) -> list:
    ddp = DistributedDataParallel(model().to("sim"), **options)
    for _ in range(2):  # the second step runs with rebuilt buckets
        ddp.zero_grad()
        ddp(batch(rank).to("sim")).square().mean().backward()
    return [p.grad.cpu().numpy() for p in ddp.parameters()]


def single_collectives():
    """Torch 2.13 renamed them, and warns of the old names."""
    if hasattr(dist, "all_gather_single"):
        return dist.all_gather_single, dist.reduce_scatter_single
    return dist.all_gather_into_tensor, dist.reduce_scatter_tensor


@with_backend(enable_sim)
def collectives(rank: int) -> None:
    sim = torch.device("sim")
    ones = torch.ones(3, device=sim) * (rank + 1)
    dist.all_reduce(ones)
    assert ones.tolist() == [3.0] * 3
    dist.all_reduce(ones, op=dist.ReduceOp.MAX)
    assert ones.tolist() == [3.0] * 3
    dist.broadcast(ones.mul_(rank + 1), src=1)
    assert ones.tolist() == [6.0] * 3
    gathered = [torch.empty(2, device=sim) for _ in range(2)]
    dist.all_gather(gathered, torch.full((2,), float(rank), device=sim))
    assert torch.cat(gathered).tolist() == [0, 0, 1, 1]
    part = torch.empty(2, device=sim)
    dist.reduce_scatter(part, list((torch.arange(4.0, device=sim) * (rank + 1)).chunk(2)))
    assert part.tolist() == [[0, 3], [6, 9]][rank]
    stacked = torch.empty(2, 3, device=sim)
    all_gather, reduce_scatter = single_collectives()
    all_gather(stacked, torch.full((3,), float(rank), device=sim))
    assert stacked.tolist() == [[0] * 3, [1] * 3]
    own = torch.empty(3, device=sim)
    reduce_scatter(own, torch.ones(2, 3, device=sim))
    assert own.tolist() == [2] * 3
    exchanged = torch.empty(2, device=sim)
    dist.all_to_all_single(exchanged, torch.tensor([10.0 * rank, 10.0 * rank + 1], device=sim))
    assert exchanged.tolist() == [rank, 10 + rank]
    if rank == 0:
        dist.send(exchanged, dst=1)
    else:
        dist.recv(exchanged, src=0)
        assert exchanged.tolist() == [0, 10]
    host = torch.ones(1)
    dist.all_reduce(host)
    assert host.item() == 2, "the same group carries CPU tensors"
    dist.barrier()


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
def test_gradients_are_the_mean_over_ranks(sim, options):
    per_rank = run_ranks(ddp_gradients, options)
    reference = model()
    sum(reference(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
    for rank in range(2):
        for ours, parameter in zip(per_rank[rank], reference.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), parameter.grad, rtol=1e-6, atol=1e-7)


def test_collectives(sim):
    assert run_ranks(collectives) == [None, None]
