"""`lowtide.checkpoint` gives the plain model's gradients, bit for bit, whatever its inputs look like."""

from __future__ import annotations

import dataclasses
import functools
import gc
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide import simdevice
from lowtide.checkpointing import Schedule
from lowtide.errors import InPlaceError, InvalidValueError, OffloadError
from lowtide.stores import HostStore
from support import eventually

TOKENS, WIDTH, LAYERS = 64, 32, 4
BOUNDARY = TOKENS * WIDTH * 4  # bytes of one hidden state


@dataclasses.dataclass(frozen=True)
class Inputs:
    hidden: torch.Tensor
    note: str = "kept"


class Pair(NamedTuple):
    hidden: torch.Tensor
    scale: float


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(hidden))))


def positional(block, hidden, run):
    return run(block, hidden)


def keyword(block, hidden, run):
    return run(block, hidden=hidden)


def nested(block, hidden, run):
    return run(lambda inputs: block(inputs["states"][0]) * inputs["scale"], {"states": [hidden], "scale": 0.5})


def in_dataclass(block, hidden, run):
    return run(lambda inputs: block(inputs.hidden), Inputs(hidden))


def in_named_tuple(block, hidden, run):
    return run(lambda pair: block(pair.hidden) * pair.scale, Pair(hidden, 0.5))


def bound(block, hidden, run):
    return run(functools.partial(block, hidden=hidden))


def transposed(block, hidden, run):
    return run(lambda h: block(h.t()), hidden.t())


def expanded(block, hidden, run):
    row = hidden.mean(0, keepdim=True).expand(TOKENS, WIDTH)
    return run(lambda h, r: block(h) + r, hidden, row)


def sliced(block, hidden, run):
    return run(lambda h: block(h[:, :WIDTH]), torch.cat([hidden, hidden], -1)[:, :WIDTH])


FORMS = [positional, keyword, nested, in_dataclass, in_named_tuple, bound, transposed, expanded, sliced]


def step(device, form, run, *, dtype=None, frozen=False):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(LAYERS)).to(device)
    hidden = torch.randn(TOKENS, WIDTH).to(device).requires_grad_(not frozen)
    torch.manual_seed(1)
    with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        x = hidden if frozen else hidden * 1
        for block in blocks:
            x = form(block, x, run)
        loss = x.float().square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(t.grad.cpu() for t in [hidden, *blocks.parameters()] if t.grad is not None)]


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def assert_same(ours, expected):
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_recompute_is_bit_identical(sim, device, form):
    assert_same(step(device, form, lowtide.checkpoint), step(device, form, plain))


@pytest.mark.parametrize("form", FORMS)
def test_offload_is_bit_identical_and_really_moves_the_inputs(sim, form):
    """Keyword, nested and bound inputs are a silent no-op elsewhere (DeepSpeed#522, composer#2724)."""
    run = functools.partial(lowtide.checkpoint, offload=Schedule(HostStore()))
    expected = step(sim, form, plain)
    simdevice.reset()
    assert_same(step(sim, form, run), expected)
    stats = simdevice.stats()
    assert stats.d2h_bytes >= (LAYERS - 1) * BOUNDARY
    assert stats.h2d_bytes >= (LAYERS - 1) * BOUNDARY
    assert simdevice.stats().pinned_bytes == 0


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"frozen": True}], ids=["autocast", "frozen-input"])
def test_autocast_and_inputs_without_gradient(sim, offload, options):
    run = functools.partial(lowtide.checkpoint, offload=Schedule(HostStore()) if offload else None)
    assert_same(step(sim, keyword, run, **options), step(sim, keyword, plain, **options))


def test_use_reentrant_is_answered_with_one_graph():
    """Hooks fire once per parameter, which is what DDP counts; the reentrant engine would also lose a frozen input."""
    block, fired = Block(), []
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    x = torch.randn(TOKENS, WIDTH)
    y = lowtide.checkpoint(block, x, use_reentrant=True)
    lowtide.checkpoint(block, y, use_reentrant=True).sum().backward()
    assert len(fired) == len(list(block.parameters()))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x).tanh()


@pytest.fixture
def engine(sim):
    """A schedule with an offloading store, on the device."""
    return Schedule(HostStore())


def chain(layers, x, schedule):
    for layer in layers:
        x = lowtide.checkpoint(layer, x, offload=schedule)
    return x


def counted_layers(count=3):
    torch.manual_seed(0)
    return nn.ModuleList(Counted() for _ in range(count)).to("sim")


def leaf():
    torch.manual_seed(1)
    return torch.randn(TOKENS, WIDTH).to("sim").requires_grad_()


def reference_grad(layers, x, times=1):
    y = x
    for layer in layers:
        y = layer(y)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    for layer in layers:
        layer.calls = 0
    return (grad * times).cpu()


def test_each_region_is_run_exactly_twice(engine):
    layers, x = counted_layers(), leaf()
    chain(layers, x, engine).square().sum().backward()
    assert [layer.calls for layer in layers] == [2, 2, 2]


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
    assert [layer.calls for layer in layers] == [1, 1, 1]
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
    outputs = []
    for factor in (1.0, 2.0, 3.0):
        hidden = (x * factor).detach().requires_grad_()
        outputs.append(lowtide.checkpoint(lambda h: h * h, hidden, offload=engine))
        del hidden
    total = sum(out.sum() for out in outputs)
    leaves = [out.grad_fn for out in outputs]
    assert len(leaves) == 3
    total.backward()


def test_tensors_that_regions_share_stay_on_the_device(engine):
    layers, x = counted_layers(), leaf()
    table = torch.randn(TOKENS, WIDTH, device="sim")
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
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device="sim"))
    x = leaf()
    y = lowtide.checkpoint(lambda h, w, s: h @ w * s, x, weight, torch.ones(3, 1, 1, device="sim"), offload=engine)
    z = lowtide.checkpoint(torch.tanh, y, offload=engine)
    z.sum().backward()
    assert simdevice.stats().d2h_bytes == BOUNDARY


def test_a_full_store_keeps_tensors_on_the_device(sim):
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


class TestWrongUse:
    def test_host_offload_on_the_cpu_is_refused_and_names_the_disk(self, sim):
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        with pytest.raises(OffloadError, match="disk tier"):
            lowtide.checkpoint(torch.tanh, x, offload="host")

    @pytest.mark.parametrize("word", ["hosst", "gpu", 3])
    def test_an_unknown_store(self, word):
        with pytest.raises(InvalidValueError, match="offload must be"):
            lowtide.checkpoint(torch.tanh, torch.ones(3, requires_grad=True), offload=word)

    def test_a_negative_limit(self):
        with pytest.raises(InvalidValueError, match="negative"):
            HostStore(limit=-1)

    def test_a_store_cannot_be_pickled(self):
        import pickle

        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(HostStore())

    def test_torchs_own_checks_stay(self):
        with pytest.raises(ValueError, match="determinism_check"):
            lowtide.checkpoint(torch.tanh, torch.ones(3, requires_grad=True), determinism_check="wrong")


class TestTorchsKeywords:
    def test_early_stop(self):
        layers = nn.Sequential(Counted(), Counted())

        def run(x):
            return layers(x) + x.detach()  # nothing after the last product is needed for backward

        lowtide.checkpoint(run, torch.randn(4, WIDTH, requires_grad=True), early_stop=False).sum().backward()
        assert [layer.calls for layer in layers] == [2, 2]

    def test_debug_names_the_operators_of_a_mismatch(self):
        calls = []

        def different(x):
            calls.append(1)
            return x.sin() if len(calls) == 1 else x.sin().cos()

        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="aten"):
            lowtide.checkpoint(
                different, torch.randn(4, 4, requires_grad=True), debug=True, early_stop=False
            ).sum().backward()

    def test_the_determinism_check_sees_another_shape(self):
        calls = []

        def different(x):
            calls.append(1)
            return (x[:2] if len(calls) > 1 else x).exp()

        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
            lowtide.checkpoint(different, torch.randn(4, 4, requires_grad=True)).sum().backward()
