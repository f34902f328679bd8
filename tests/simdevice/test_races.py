"""The race detector: each broken rule is reported, by name; each correct program is left alone."""

from __future__ import annotations

import pytest
import torch

from lowtide import simdevice
from lowtide.errors import DeviceViolationError
from support import expect_violation


@pytest.fixture
def side(sim) -> torch.Stream:
    return torch.Stream(device=sim)


def compute() -> torch.Stream:
    return torch.accelerator.current_stream()


def copy_out(x: torch.Tensor, side: torch.Stream) -> torch.Tensor:
    """Pinned memory that `side` copies into, as late as it may."""
    host = torch.empty(1000, pin_memory=True)
    with side:
        host.copy_(x, non_blocking=True)
    return host


def test_reading_before_the_producer_is_waited_for(sim, side):
    x = torch.randn(1000, device=sim) * 3
    _held = copy_out(x, side)
    found = expect_violation("read-race")
    assert (found.op, found.stream, found.other_op, found.other_stream) == ("D2H copy", side.stream_id, "aten::mul", 0)
    assert found.bytes == 4000
    assert "\n" not in str(found)
    for word in ("D2H copy", f"stream {side.stream_id}", "aten::mul", "stream 0", "4000 bytes"):
        assert word in str(found)


def test_overwriting_while_another_stream_reads(sim, side):
    x = torch.ones(1000, device=sim)
    side.wait_stream(compute())
    host = copy_out(x, side)
    x.mul_(2)
    side.synchronize()
    assert host.eq(2).all(), "the late copy saw the new values"
    assert expect_violation("write-race").op == "aten::mul"


def test_two_unordered_writers(sim, side):
    x = torch.zeros(1000, device=sim)
    torch.accelerator.synchronize()
    with side:
        x.fill_(1)
    x.fill_(2)
    expect_violation("write-race")


def test_freeing_while_another_stream_reads(sim, side):
    x = torch.ones(1000, device=sim)
    side.wait_stream(compute())
    host = copy_out(x, side)
    del x
    side.synchronize()
    assert host.isnan().all(), "the memory was poisoned under the copy"
    found = expect_violation("use-after-free")
    assert (found.stream, found.other_op, found.other_stream, found.bytes) == (0, "D2H copy", side.stream_id, 4096)


def prefetch_twice(sim, side, *, wait: bool) -> torch.Tensor:
    """A prefetched tensor goes back to the pool of `side` while the compute stream may still read it."""
    host = torch.randn(1000).pin_memory()
    with side:
        first = host.to(sim, non_blocking=True)
    compute().wait_stream(side)
    doubled = first * 2
    del first
    if wait:
        side.wait_stream(compute())
    with side:
        second = host[:500].to(sim, non_blocking=True)  # an allocator may give it the same memory
    compute().wait_stream(side)
    side.wait_event((second + 1).sum() and compute().record_event())
    return doubled


def test_prefetching_over_memory_that_the_compute_stream_still_reads(sim, side):
    assert prefetch_twice(sim, side, wait=False).isfinite().all().item()
    found = expect_violation("use-after-free")
    assert (found.op, found.stream, found.other_op, found.other_stream) == ("H2D copy", side.stream_id, "aten::mul", 0)


def test_small_blocks_in_between_do_not_hide_the_reuse(sim, side):
    host = torch.randn(1000).pin_memory()
    with side:
        first = host.to(sim, non_blocking=True)
    compute().wait_stream(side)
    doubled = first * 2
    del first
    with side:
        tiny = torch.empty(1, device=sim)
        second = host.to(sim, non_blocking=True)
    side.synchronize()
    assert doubled.shape == second.shape
    assert tiny.numel() == 1
    assert expect_violation("use-after-free").op == "H2D copy"


def test_hidden_writes_of_batch_norm_are_seen(sim, side):
    x, mean, var = torch.randn(4, 3, device=sim), torch.zeros(3, device=sim), torch.ones(3, device=sim)
    side.wait_stream(compute())
    with side:
        torch.nn.functional.batch_norm(x, mean, var, training=True)
    assert (mean + 1).shape == (3,)
    assert expect_violation("read-race").other_op == "aten::native_batch_norm"


def test_filling_recycled_memory_before_its_last_user_is_done(sim, side):
    host = torch.randn(1000).pin_memory()
    old = torch.randn(1000, device=sim)
    old.mul_(2)
    del old
    new = torch.empty(1000, device=sim)
    with side:
        new.copy_(host, non_blocking=True)
    found = expect_violation("use-after-free")
    assert "handed out again while aten::mul on stream 0 may still use them" in str(found)


def test_a_wait_on_the_wrong_stream(sim, side):
    other = torch.Stream(device=sim)
    with other:
        x = torch.ones(1000, device=sim) * 2
    side.wait_stream(compute())  # the work was on `other`
    _held = copy_out(x, side)
    found = expect_violation("read-race")
    assert found.other_stream == other.stream_id


def test_an_event_recorded_too_early(sim, side):
    x = torch.ones(1000, device=sim)
    too_early = compute().record_event()
    x.mul_(2)
    side.wait_event(too_early)
    _held = copy_out(x, side)
    expect_violation("read-race")


def test_raise_mode_raises_where_the_rule_is_broken(sim, side):
    simdevice.enable(on_violation="raise")
    x = torch.randn(1000, device=sim)
    with pytest.raises(DeviceViolationError, match=r"read-race: aten::add"), side:
        x + 1
    assert expect_violation("read-race").stream == side.stream_id


def test_raise_mode_raises_a_bad_free_at_the_next_operation(sim, side):
    simdevice.enable(on_violation="raise")
    x = torch.randn(1000, device=sim)
    side.wait_stream(compute())
    with side:
        y = x + 1
    del x
    with pytest.raises(DeviceViolationError, match="use-after-free"):
        torch.ones(1, device=sim)
    side.synchronize()
    assert y.isfinite().all().item()
    expect_violation("use-after-free")


def test_raise_mode_reaches_through_backward(sim, side):
    simdevice.enable(on_violation="raise")

    def unpack(packed):
        with side:
            return packed.to("sim", non_blocking=True)  # and nothing waits for it

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu().pin_memory(), unpack):
        x = torch.randn(1000, device=sim, requires_grad=True)
        loss = x.square().sum()
    with pytest.raises(DeviceViolationError):
        loss.backward()
    expect_violation("read-race")


def test_raise_mode_raises_a_bad_free_when_the_host_waits(sim, side):
    simdevice.enable(on_violation="raise")
    x = torch.ones(1000, device=sim)
    side.wait_stream(compute())
    _held = copy_out(x, side)
    del x
    with pytest.raises(DeviceViolationError, match="use-after-free"):
        torch.accelerator.synchronize()
    expect_violation("use-after-free")


def test_leaving_raise_mode_drops_what_was_not_raised_yet(sim, side):
    simdevice.enable(on_violation="raise")
    x = torch.ones(1000, device=sim)
    side.wait_stream(compute())
    _held = copy_out(x, side)
    del x
    simdevice.enable(on_violation="record")
    assert torch.ones(1, device=sim).item() == 1
    expect_violation("use-after-free")


class TestCorrectPrograms:
    """The `sim` fixture fails any of these that is reported."""

    def test_wait_before_and_reference_until_the_copy_is_waited_for(self, sim, side):
        x = torch.randn(1000, device=sim) * 3
        expected = x.cpu()
        host = torch.empty(1000, pin_memory=True)
        side.wait_stream(compute())
        with side:
            host.copy_(x, non_blocking=True)
            copied = side.record_event()
        compute().wait_event(copied)
        del x
        copied.synchronize()
        assert torch.equal(host, expected)

    def test_prefetch_with_the_pool_stream_waiting_before_the_free(self, sim, side):
        host = torch.randn(1000).pin_memory()
        with side:
            x = host.to(sim, non_blocking=True)
        compute().wait_stream(side)
        y = x * 2
        side.wait_event(compute().record_event())
        del x
        assert torch.equal(y.cpu(), host * 2)

    def test_free_first_and_wait_before_the_memory_is_used_again(self, sim, side):
        assert prefetch_twice(sim, side, wait=True).isfinite().all().item()

    def test_blocks_that_cannot_be_the_freed_memory_are_left_alone(self, sim, side):
        """Too big for it, or of the other pool (CUDA keeps blocks up to 1 MiB apart)."""
        for freed, new in ((1000, 100_000), (1 << 20, 4)):
            host = torch.randn(freed).pin_memory()
            with side:
                first = host.to(sim, non_blocking=True)
            compute().wait_stream(side)
            doubled = first * 2
            del first
            with side:
                second = torch.ones(new, device=sim)
            torch.accelerator.synchronize()
            assert doubled.numel() == freed
            assert second.sum().item() == new

    def test_order_through_a_third_stream(self, sim, side):
        third = torch.Stream(device=sim)
        x = torch.randn(1000, device=sim)
        third.wait_stream(compute())
        side.wait_stream(third)
        with side:
            y = x * 2
        compute().wait_stream(side)
        assert torch.equal(y.cpu(), x.cpu() * 2)
        third.wait_stream(side)
        side.wait_stream(compute())

    def test_order_through_the_host(self, sim, side):
        x = torch.randn(1000, device=sim)
        torch.accelerator.synchronize()
        with side:
            y = x * 2
        side.synchronize()
        assert torch.equal(y.cpu(), x.cpu() * 2)
        side.wait_stream(compute())

    def test_item_orders_the_host_after_the_stream(self, sim, side):
        x = torch.randn(1000, device=sim)
        x.sum().item()
        with side:
            x.mul_(2)
        side.synchronize()
        assert simdevice.violations() == []

    def test_two_halves_of_one_buffer_on_two_streams(self, sim, side):
        x = torch.empty(2000, device=sim)
        side.wait_stream(compute())
        with side:
            x[:1000].fill_(1)
        x[1000:].fill_(2)
        compute().wait_stream(side)
        assert x.sum().item() == 3000

    def test_many_readers(self, sim, side):
        x = torch.randn(1000, device=sim)
        side.wait_stream(compute())
        with side:
            a = x * 2
        b = x * 2
        compute().wait_stream(side)
        assert torch.equal(a, b)
        side.wait_stream(compute())
