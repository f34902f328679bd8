"""Faults that a review of the engine found, each as it was shown."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lowtide
from lowtide import simdevice
from lowtide.counters import RegionLedger
from support.devices import DEVICE

SHAPE = (64, 64)


def leaf(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(SHAPE, dtype=dtype).to(DEVICE).requires_grad_()


def test_a_conjugate_view_is_not_taken_for_its_base(device):
    def grad(offload):
        x = leaf(torch.complex64)
        y = x * 1
        out = lowtide.checkpoint(lambda a, b: (a * b * b).abs(), y, y.conj(), offload=offload)
        lowtide.checkpoint(torch.tanh, out, offload=offload).sum().backward()
        return x.grad.cpu()

    assert torch.equal(grad(lowtide.Schedule(lowtide.HostStore())), grad(None))


def test_one_object_stays_one_object_in_recompute(device):
    x = leaf()
    same = []

    def f(a, b, c):
        same.append(a is b is c[0])
        return (a.sin() if a is b else b.exp()) + c[0]

    schedule = lowtide.Schedule(lowtide.HostStore())
    y = x * 1
    lowtide.checkpoint(
        torch.tanh, lowtide.checkpoint(f, y, y, [y], offload=schedule), offload=schedule
    ).sum().backward()
    assert same == [True, True]


def test_a_buffer_refilled_behind_autograd_is_stored_again(device):
    schedule = lowtide.Schedule(lowtide.HostStore())
    weight = leaf()
    buffer = torch.ones(SHAPE, device=device)

    def f(b):
        return b * weight

    first = lowtide.checkpoint(f, buffer, offload=schedule)
    for _ in range(3):
        first = lowtide.checkpoint(torch.tanh, first, offload=schedule)
    buffer.data.copy_(torch.full(SHAPE, 3.0, device=device))
    second = lowtide.checkpoint(f, buffer, offload=schedule)
    lowtide.checkpoint(torch.clone, second, offload=schedule).sum().backward()
    assert weight.grad.eq(3).all().item()


def test_memory_of_another_stream_is_not_given_back_under_a_copy(sim):
    side = torch.Stream(device=sim)
    schedule = lowtide.Schedule(lowtide.HostStore())
    x = leaf() * 1
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = lowtide.checkpoint(torch.tanh, x, offload=schedule)
        for _ in range(3):
            y = lowtide.checkpoint(torch.tanh, y, offload=schedule)
    del x
    filler = [torch.ones(SHAPE, device=sim) for _ in range(4)]
    with side:
        y.sum().backward()
    torch.accelerator.synchronize()
    assert len(filler) == 4
    assert simdevice.violations() == []


@pytest.mark.parametrize("kind", ["word", "store", "schedule"])
def test_every_form_of_offload_moves_bytes(sim, kind):
    offload = {"word": "host", "store": lowtide.HostStore()}.get(kind) or lowtide.Schedule(lowtide.HostStore())
    x = leaf()
    simdevice.reset()
    y = x * 1
    for _ in range(4):
        y = lowtide.checkpoint(torch.tanh, y, offload=offload)
    y.sum().backward()
    moved = simdevice.stats().d2h_bytes
    assert moved >= 3 * x.nbytes
    assert x.grad.isfinite().all().item()


def test_a_side_table_on_the_cpu_stays_where_it_is(device):
    x, table = leaf(), torch.ones(SHAPE)
    schedule = lowtide.Schedule(lowtide.HostStore())
    y = lowtide.checkpoint(lambda h, t: h * t.sum().item(), x * 1, table, offload=schedule)
    lowtide.checkpoint(torch.tanh, y, offload=schedule).sum().backward()
    assert x.grad.isfinite().all().item()


def test_a_prefetch_that_does_not_fit_is_fetched_later(device, monkeypatch):
    from lowtide.stores import host

    def no_room(self):
        if not self._was_refused:
            self._was_refused = True
            raise torch.OutOfMemoryError("early")
        return fetch(self)

    fetch = host.HostStored._start_fetch
    monkeypatch.setattr(host.HostStored, "_was_refused", False, raising=False)
    monkeypatch.setattr(host.HostStored, "_start_fetch", no_room)
    schedule, x = lowtide.Schedule(lowtide.HostStore()), leaf()
    y = x * 1
    for _ in range(2):
        y = lowtide.checkpoint(torch.tanh, y, offload=schedule)
    y.sum().backward()
    assert x.grad.isfinite().all().item()


def test_a_region_that_raises_does_not_break_the_chain(device):
    """The region before it still gives its memory back when the next one runs."""
    schedule = lowtide.Schedule(store := lowtide.HostStore())
    y = lowtide.checkpoint(torch.tanh, leaf() * 1, offload=schedule)

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lowtide.checkpoint(fail, y, offload=schedule)
    z = lowtide.checkpoint(torch.sin, y, offload=schedule)
    assert schedule._newest().previous() is not None
    assert store.bytes_used >= y.nbytes
    z.sum().backward()


def test_bytes_restored_on_one_stream_are_waited_for_on_another(sim):
    """Two views of one tensor are unpacked on two streams, with a link so slow that a missing wait would be a race."""
    simdevice.enable(h2d=1e6, d2h=1e6)
    schedule = lowtide.Schedule(lowtide.HostStore())
    y = leaf() * 1
    call = schedule.begin(RegionLedger("one"))
    packed = [call.pack(view) for view in (y, y.view(-1))]
    call.start()
    call.release()
    expected = y.cpu()
    del y
    first = call.unpack(packed[0])
    side = torch.Stream(device=sim)
    with side:
        second = call.unpack(packed[1]) * 1
    assert call.ledger.restored_bytes == first.nbytes, "brought back once"
    torch.accelerator.current_stream().wait_stream(side)
    assert torch.equal(first.cpu(), expected)
    assert torch.equal(second.cpu(), expected.view(-1))


def test_an_argument_that_holds_itself(device):
    @dataclasses.dataclass
    class Linked:
        value: torch.Tensor
        self_: object = None

    linked = Linked(leaf())
    linked.self_ = linked
    lowtide.checkpoint(lambda a: a.value.sin(), linked).sum().backward()
    assert torch.equal(linked.value.grad.cpu(), linked.value.detach().cos().cpu())
