"""Whatever becomes of a graph, a region's gradient is right or refused, and nothing is left behind."""

from __future__ import annotations

import gc

import pytest
import torch

import lowtide
from lowtide import simdevice
from lowtide.errors import InPlaceError
from models.chains import BOUNDARY, chain, counted_layers, leaf, reference_grad
from support import eventually


def test_each_region_is_run_exactly_twice(engine):
    layers, x = counted_layers(), leaf()
    chain(layers, x, engine).square().sum().backward()
    assert [layer.seen.calls for layer in layers] == [2, 2, 2]


def test_two_forwards_before_one_backward(engine):
    """A global tracker fails here: trl#4280, torchtune#2709."""
    layers, x = counted_layers(), leaf()
    expected = reference_grad(layers, x)
    one, two = chain(layers, x, engine).square().sum(), chain(layers, x, engine).square().sum()
    (one + two).backward()
    torch.testing.assert_close(x.grad.cpu(), expected * 2)


def test_retain_graph_and_a_second_backward(engine):
    layers, x = counted_layers(), leaf()
    expected = reference_grad(layers, x)
    loss = chain(layers, x, engine).square().sum()
    loss.backward(retain_graph=True)
    assert torch.equal(x.grad.cpu(), expected)
    loss.backward()
    assert torch.equal(x.grad.cpu(), expected * 2)


def test_double_backward_and_autograd_grad(engine):
    layers, x = counted_layers(), leaf()

    def second_order(run):
        (grad,) = torch.autograd.grad(run().square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), x)
        return again.cpu()

    def plainly():
        y = x
        for layer in layers:
            y = layer(y)
        return y

    assert torch.equal(second_order(lambda: chain(layers, x, engine)), second_order(plainly))
    assert all(p.grad is None for p in layers.parameters())


def test_gradient_accumulation_over_steps(engine):
    layers, x = counted_layers(), leaf()
    expected = reference_grad(layers, x)
    for _ in range(3):
        chain(layers, x, engine).square().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), expected * 3)


def test_a_module_called_several_times(engine):
    layers, x = counted_layers(1), leaf()
    expected = reference_grad([layers[0]] * 3, x)
    chain([layers[0]] * 3, x, engine).square().sum().backward()
    assert torch.equal(x.grad.cpu(), expected)


def test_nested_checkpoints_leave_the_inner_inputs_to_the_outer_one(engine):
    layers, x = counted_layers(3), leaf()
    expected = reference_grad(layers, x)
    simdevice.reset()

    def both(y):
        return chain(layers[1:], y, engine)

    y = lowtide.checkpoint(layers[0], x, offload=engine)
    lowtide.checkpoint(both, y, offload=engine).square().sum().backward()
    moved = simdevice.stats().d2h_bytes
    assert torch.equal(x.grad.cpu(), expected)
    assert moved == BOUNDARY, "only the first region's input left; the outer one is the last"


def test_no_grad_and_eval_do_no_work(engine):
    layers, x = counted_layers(), leaf()
    simdevice.reset()
    with torch.no_grad():
        chain(layers, x, engine)
    assert [layer.seen.calls for layer in layers] == [1, 1, 1]
    assert simdevice.stats().copies == 0


def test_a_backward_that_never_comes_leaks_nothing(engine):
    """trl#5700, trl#5730"""
    layers, x = counted_layers(), leaf()
    gc.collect()
    before = simdevice.stats()
    y = chain(layers, x, engine)
    assert engine.store.bytes_used > 0
    del y
    gc.collect()
    torch.accelerator.synchronize()
    assert engine.store.bytes_used == 0
    assert simdevice.stats().pinned_bytes == before.pinned_bytes
    assert simdevice.stats().live_bytes == before.live_bytes


def test_an_error_in_forward_leaves_nothing_behind(engine):
    layers, x = counted_layers(), leaf()

    def fails(_):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        lowtide.checkpoint(fails, chain(layers, x, engine), offload=engine)
    assert eventually(lambda: engine.store.bytes_used == 0)
    chain(layers, x, engine).square().sum().backward()
    assert torch.equal(x.grad.cpu(), reference_grad(layers, x))


def test_an_error_in_backward_leaves_nothing_behind(engine):
    layers, x = counted_layers(), leaf()
    y = chain(layers, x, engine)
    handle = y.register_hook(lambda _: (_ for _ in ()).throw(ValueError("mine")))
    with pytest.raises(ValueError, match="mine"):
        y.square().sum().backward()
    handle.remove()
    del y, handle
    assert eventually(lambda: engine.store.bytes_used == 0)


@pytest.mark.parametrize("when", ["held", "away"])
def test_an_in_place_change_that_autograd_refuses_is_refused(engine, when):
    """Pass-through hooks switch autograd's own check off: peers return a wrong gradient."""
    layers, x = counted_layers(), leaf()
    hidden = x * 1
    y = lowtide.checkpoint(layers[0], hidden, offload=engine)
    if when == "away":
        y = chain(layers[1:], y, engine)
    hidden.add_(1)
    del hidden
    with pytest.raises(InPlaceError, match="modified by an inplace operation"):
        y.square().sum().backward()


def test_a_small_tensor_that_stays_is_checked_too(engine):
    layers, scale = counted_layers(1), torch.ones(1, device="sim").requires_grad_()
    small = scale * 1
    y = lowtide.checkpoint(lambda x, s: layers[0](x) * s, leaf(), small, offload=engine)
    small.add_(1)
    with pytest.raises(InPlaceError):
        y.sum().backward()
