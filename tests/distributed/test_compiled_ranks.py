"""Compiled regions under DDP, with and without a communication hook, and under FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from models.shared_block import batch, model
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks

STEPS = 2


def compiled(policy: str | None, when: str):
    counter = CompileCounterWithBackend("aot_eager")
    net = model()
    net.unused.requires_grad_(False)
    applied = lowtide.apply(net, policy) if policy and when == "after" else None
    for layer in net.layers:
        layer.compile(backend=counter)
    if policy and when == "before":
        applied = lowtide.apply(net, policy)
    return net, applied, counter


def train(called, net, rank):
    for _ in range(STEPS):
        net.zero_grad()
        called(batch(rank)).square().mean().backward()


def around_ddp(net):
    return DistributedDataParallel(net)


def around_fsdp2(net):
    mesh = init_device_mesh("cpu", (2,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def gradients(rank: int, around, when: str) -> dict:
    """The gradients under a policy, which compiles as many graphs as there are without it."""
    plain, _, expected = compiled(None, when)
    train(around(plain), plain, rank)
    net, applied, counter = compiled("recompute", when)
    train(around(net), net, rank)
    assert counter.frame_count == expected.frame_count > 0
    assert all(region.recomputes == region.forwards > 0 for region in applied.report().regions)
    return to_numpy(net)


def compiled_around(rank: int, policy: str) -> dict:
    """The gradients of a model whose DDP is compiled: its layers' graphs run in forward, and again in backward."""
    runs: list[str] = []

    def backend(graph, _inputs):
        code = str(graph.code)

        def run(*args):
            runs.append(code)
            return graph(*args)

        return run

    net = model()
    net.unused.requires_grad_(False)
    applied = lowtide.apply(net, policy)
    ddp = torch.compile(DistributedDataParallel(net), backend=backend)
    train(ddp, net, rank)
    runs.clear()
    net.zero_grad()
    loss = ddp(batch(rank)).square().mean()
    forward = len(runs)
    loss.backward()
    assert len(runs) - forward >= len(net.layers), "each recompute runs compiled"
    assert set(runs[forward:]) <= set(runs[:forward])
    assert all(region.recomputes == region.forwards > 0 for region in applied.report().regions)
    return to_numpy(net)


def test_ddp_that_is_compiled():
    per_rank = run_ranks(compiled_around, "recompute")
    reference = model()
    sum(reference(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
    assert_joined(per_rank, reference, leave_out=["unused"])


def with_a_hook(rank: int, hook: str) -> list[dict]:
    """The gradients without a policy and with one, under the same communication hook."""
    found = []
    for policy in (None, "recompute"):
        net, _, _ = compiled(policy, "after")
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(None, getattr(default_hooks, hook))
        train(ddp, net, rank)
        found.append(to_numpy(net))
    return found


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("around", [around_ddp, around_fsdp2], ids=["ddp", "fsdp2"])
def test_gradients_are_those_of_the_joined_batch(around, when):
    per_rank = run_ranks(gradients, around, when)
    reference = model()
    sum(reference(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
    assert_joined(per_rank, reference, leave_out=["unused"])


@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook"])
def test_a_communication_hook_gets_the_gradients_that_it_gets_without_a_policy(hook):
    for plain, recomputed in run_ranks(with_a_hook, hook):
        assert plain.keys() == recomputed.keys()
        assert all((plain[name] == recomputed[name]).all() for name in plain)
