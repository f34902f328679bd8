"""Which tensors go to the store, counted in bytes; and that they come back as what they were."""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from lowtide import simdevice
from lowtide.checkpointing import Schedule
from lowtide.stores import HostStore
from models.chains import BOUNDARY, TOKENS, WIDTH, chain, counted_layers, leaf, reference_grad
from support.devices import DEVICE


def test_aliases_with_other_shapes_are_not_taken_for_each_other(engine):
    """Dedupe by address alone makes `q @ q.T` wrong: ms-swift#10157."""
    x = leaf()
    expected = torch.autograd.grad((x @ x.t()).sum(), x)[0].cpu()
    q = x * 1
    y = lowtide.checkpoint(lambda a, b: a @ b, q, q.t(), offload=engine)
    z = lowtide.checkpoint(lambda t: t * 1, y, offload=engine)
    z.sum().backward()
    assert torch.equal(x.grad.cpu(), expected)


def test_a_new_tensor_at_an_old_address_is_not_taken_for_the_old_one(engine):
    x = leaf()
    outputs = [lowtide.checkpoint(lambda h: h * h, x * factor, offload=engine) for factor in (1.0, 2.0, 3.0)]
    sum(out.sum() for out in outputs).backward()
    assert torch.allclose(x.grad, 2 * (1 + 4 + 9) * x.detach())


def test_tensors_that_regions_share_stay_on_the_device(engine):
    layers, x = counted_layers(), leaf()
    table = torch.randn(TOKENS, WIDTH, device=DEVICE)
    simdevice.reset()
    y = x
    for layer in layers:
        y = lowtide.checkpoint(lambda h, t, layer=layer: layer(h) + t, y, t=table, offload=engine)
    y.sum().backward()
    assert simdevice.stats().d2h_bytes == 2 * BOUNDARY, "the two first hidden states, and not the table"


def test_restored_tensors_are_not_held(engine):
    """DeepSpeed#8282: holding them undoes the offload in backward."""
    layers, x = counted_layers(8), leaf()
    y = chain(layers, x, engine)
    torch.accelerator.synchronize()
    simdevice.reset()
    before = simdevice.stats().live_bytes
    y.square().sum().backward()
    weights = sum(p.nbytes for p in layers.parameters())
    assert simdevice.stats().peak_bytes - before < weights + x.nbytes + 8 * BOUNDARY


def test_parameters_and_small_tensors_stay(engine):
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=DEVICE))
    x = leaf()
    y = lowtide.checkpoint(lambda h, w, s: h @ w * s, x, weight, torch.ones(3, 1, 1, device=DEVICE), offload=engine)
    z = lowtide.checkpoint(torch.tanh, y, offload=engine)
    z.sum().backward()
    assert simdevice.stats().d2h_bytes == BOUNDARY


def test_views_of_parameters_stay(engine):
    """Their memory is the parameter's, which stays whatever happens to the view."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=DEVICE))
    y = lowtide.checkpoint(lambda h, w: h @ w, leaf(), weight.t(), offload=engine)
    z = lowtide.checkpoint(torch.tanh, y, offload=engine)
    z.sum().backward()
    assert simdevice.stats().d2h_bytes == BOUNDARY


def test_a_full_store_keeps_tensors_on_the_device(device):
    schedule = Schedule(HostStore(limit=2 * BOUNDARY))
    layers, x = counted_layers(6), leaf()
    expected = reference_grad(layers, x)
    chain(layers, x, schedule).square().sum().backward()
    assert torch.equal(x.grad.cpu(), expected)
    assert 0 < schedule.store.peak_bytes <= 2 * BOUNDARY


def test_freed_bytes_after_forward(engine):
    count = 8
    layers, x = counted_layers(count), leaf()
    left = {}
    for name, schedule in (("recompute", None), ("offload", engine)):
        torch.accelerator.synchronize()
        before = simdevice.stats().live_bytes
        y = chain(layers, x, schedule)
        torch.accelerator.synchronize()
        left[name] = simdevice.stats().live_bytes - before
        del y
    offloaded = count - 2  # the first input is the user's own, the last one stays
    assert left["recompute"] - left["offload"] >= 0.99 * offloaded * BOUNDARY
