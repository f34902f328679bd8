"""Selective checkpointing keeps torch's meaning, and a policy that asks for offload gets it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide import simdevice
from lowtide.checkpointing import Schedule
from lowtide.errors import OffloadError
from lowtide.stores import HostStore

SIZE = 64
PRODUCT = SIZE * SIZE * 4


def contexts(answer):
    def policy(_context, operator, *_args, **_kwargs):
        return answer if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def products(x, weights):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def run(engine, device, **options):
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE).to(device).requires_grad_()
    weights = [torch.randn(SIZE, SIZE).to(device) / 8 for _ in range(4)]
    simdevice.reset()
    engine(products, x, weights, **options).square().sum().backward()
    stats = simdevice.stats()
    return x.grad.cpu(), stats


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_policies_do_what_they_do_in_torch(sim, answer):
    theirs, their_stats = run(checkpoint, sim, use_reentrant=False, context_fn=contexts(answer))
    ours, our_stats = run(lowtide.checkpoint, sim, context_fn=contexts(answer))
    assert torch.equal(ours, theirs)
    assert our_stats.flops == their_stats.flops


def test_torch_recomputes_silently_where_offload_was_asked_for(sim):
    """The fault that this guards against: if torch mends it, our own way can go."""
    _, stats = run(checkpoint, sim, use_reentrant=False, context_fn=contexts(CheckpointPolicy.MUST_CPU_OFFLOAD))
    assert stats.d2h_bytes == 0


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
@pytest.mark.parametrize("shared_store", [False, True])
def test_offload_is_honoured(sim, answer, shared_store):
    kept, kept_stats = run(lowtide.checkpoint, sim, context_fn=contexts(CheckpointPolicy.MUST_SAVE))
    offload = Schedule(HostStore()) if shared_store else None
    ours, stats = run(lowtide.checkpoint, sim, context_fn=contexts(answer), offload=offload)
    assert torch.equal(ours, kept)
    assert stats.flops == kept_stats.flops, "no product was computed again"
    inputs = 5 if shared_store else 0  # with a store given, x and the four weights are offloaded as well
    assert stats.d2h_bytes == (3 + inputs) * PRODUCT, "all products but the last, which backward needs first"
    assert stats.h2d_bytes == (3 + inputs) * PRODUCT
    assert simdevice.stats().pinned_bytes == 0


def test_offload_of_cpu_tensors_is_refused(sim):
    with pytest.raises(OffloadError, match="disk tier"):
        run(lowtide.checkpoint, "cpu", context_fn=contexts(CheckpointPolicy.MUST_CPU_OFFLOAD))
