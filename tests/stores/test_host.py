"""The host store by itself: bytes leave the device, wait in pinned memory, and come back, all counted by the device."""

from __future__ import annotations

import gc

import pytest
import torch

from lowtide import simdevice
from lowtide.errors import OffloadError
from lowtide.stores import HostStore
from support.devices import DEVICE

NBYTES = 1 << 16
SLOW = 1e6
"""Bytes per second of a link on which a copy of `NBYTES` takes 65 ms."""


@pytest.fixture
def store(sim) -> HostStore:
    return HostStore()


def random(nbytes: int = NBYTES, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(nbytes // dtype.itemsize).to(dtype).to(DEVICE)


def put_away(store: HostStore, raw: torch.Tensor):
    stored = store.put(raw)
    assert stored.start()
    stored.release()
    return stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.double], ids=str)
def test_what_was_put_comes_back_bit_by_bit(store, dtype):
    raw = random(dtype=dtype)
    expected = raw.cpu()
    stored = put_away(store, raw)
    del raw
    back = stored.get()
    assert (back.dtype, back.device.type, back.shape) == (dtype, DEVICE, expected.shape)
    assert torch.equal(back.cpu(), expected)


def test_every_byte_crosses_the_link_once_each_way(store):
    raw = random()
    simdevice.reset()
    stored = store.put(raw)
    assert simdevice.stats().d2h_bytes == 0, "nothing moves until it is told to"
    assert stored.start()
    assert stored.start(), "a second start begins nothing"
    stored.release()
    del raw
    stored.get()
    assert (simdevice.stats().d2h_bytes, simdevice.stats().h2d_bytes) == (NBYTES, NBYTES)


def test_device_memory_is_held_until_it_is_released(store):
    before = simdevice.stats().live_bytes
    stored = store.put(random())
    assert stored.start()
    assert simdevice.stats().live_bytes == before + NBYTES
    assert not stored.is_away
    stored.release()
    assert simdevice.stats().live_bytes == before
    assert stored.is_away
    back = stored.get()
    assert simdevice.stats().live_bytes == before + NBYTES
    del back
    assert simdevice.stats().live_bytes == before, "the store does not keep alive what it gave"


def test_what_was_not_released_is_given_as_it_is(store):
    raw = random()
    simdevice.reset()
    stored = store.put(raw)
    assert stored.get() is raw
    assert stored.start()
    assert stored.get() is raw
    assert simdevice.stats().h2d_bytes == 0


def test_a_release_without_a_start_gives_nothing_away(store):
    raw = random()
    stored = store.put(raw)
    stored.release()
    assert not stored.is_away
    assert stored.get() is raw


def test_the_host_and_the_compute_stream_do_not_wait_for_a_copy_to_begin(store):
    simdevice.enable(d2h=SLOW)
    raw = random()
    torch.accelerator.synchronize()
    stored = store.put(raw)
    event = torch.Event(device=DEVICE)
    assert stored.start()
    event.record(torch.accelerator.current_stream())
    assert event.query(), "the compute stream goes on under the copy"
    stored.release()
    assert store.seconds_waited == pytest.approx(NBYTES / SLOW, rel=0.1), "it waits before the memory is used again"


def test_a_prefetch_overlaps_with_compute(store):
    def seconds_waited(*, early: bool) -> float:
        torch.accelerator.synchronize()
        before = store.seconds_waited
        stored = put_away(store, random())
        torch.accelerator.synchronize()
        if early:
            stored.prefetch()
            x = torch.ones(512, 512, device=DEVICE)
            while simdevice.stats().busy_compute < busy + 2 * NBYTES / SLOW:
                x = x @ x * 1e-3
        assert stored.get().isfinite().all().item()
        assert stored.take_fetched() == NBYTES
        assert stored.take_fetched() == 0, "it was told already"
        return store.seconds_waited - before

    simdevice.enable(h2d=SLOW, flops=1e10)
    busy = simdevice.stats().busy_compute
    late = seconds_waited(early=False)
    busy = simdevice.stats().busy_compute
    assert late >= NBYTES / SLOW
    assert seconds_waited(early=True) < late / 10


def test_prefetch_brings_back_once(store):
    stored = put_away(store, random())
    simdevice.reset()
    stored.prefetch()
    back = stored.get()
    stored.prefetch()
    assert back is not None
    assert simdevice.stats().h2d_bytes == NBYTES


def test_the_same_memory_is_given_while_it_is_in_use_and_fetched_again_afterwards(store):
    stored = put_away(store, random())
    simdevice.reset()
    first = stored.get()
    second = stored.get()
    assert second.data_ptr() == first.data_ptr()
    assert simdevice.stats().h2d_bytes == NBYTES
    expected = first.cpu()
    del first, second
    assert torch.equal(stored.get().cpu(), expected)
    assert simdevice.stats().h2d_bytes == 2 * NBYTES


def test_what_is_full_takes_nothing_and_has_room_again_later(device):
    store = HostStore(limit=2 * NBYTES)
    held = [put_away(store, random()) for _ in range(2)]
    raw = random()
    refused = store.put(raw)
    assert not refused.start()
    refused.release()
    assert not refused.is_away
    assert refused.get() is raw
    assert store.bytes_used == 2 * NBYTES
    held.pop()
    assert refused.start()
    refused.release()
    assert refused.is_away


def test_a_limit_may_be_text_and_is_kept(device):
    store = HostStore(limit="128KiB")
    held = [store.put(random()) for _ in range(5)]
    assert [stored.start() for stored in held] == [True, True, False, False, False]
    assert store.peak_bytes <= store.limit == 128 * 1024


def test_figures(store):
    held = [put_away(store, random()) for _ in range(3)]
    assert (store.bytes_used, store.peak_bytes) == (3 * NBYTES, 3 * NBYTES)
    held.pop()
    usage = store.usage()
    assert (usage.host_bytes, usage.peak_host_bytes, usage.pageable_bytes) == (2 * NBYTES, 3 * NBYTES, 0)
    assert usage.seconds_waited == store.seconds_waited > 0
    assert usage.disk is None


def test_memory_goes_with_what_it_was_for(store):
    gc.collect()
    pinned, live = simdevice.stats().pinned_bytes, simdevice.stats().live_bytes
    held = [put_away(store, random()) for _ in range(4)]
    held.append(store.put(random()))
    assert held[-1].start()  # dies while it is copied
    held[0].prefetch()  # dies while it comes back
    assert simdevice.stats().pinned_bytes > pinned
    held.clear()
    assert store.bytes_used == 0
    torch.accelerator.synchronize()
    assert (simdevice.stats().live_bytes, simdevice.stats().pinned_bytes) == (live, pinned)


def test_host_memory_is_not_overwritten_under_a_copy_back(sim, store):
    """The pieces of one that died go to the next one, while the link may still read them for another stream."""
    simdevice.enable(h2d=SLOW)
    first = random()
    expected = first.cpu()
    stored, beside = put_away(store, first), put_away(store, random())
    del first
    side = torch.Stream(device=sim)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        back = stored.get()
    pinned = simdevice.stats().pinned_bytes
    del stored
    again = put_away(store, torch.zeros(NBYTES // 4, device=sim))
    assert (again.is_away, beside.is_away) == (True, True)
    assert simdevice.stats().pinned_bytes == pinned, "the memory is used again"
    torch.accelerator.current_stream().wait_stream(side)
    assert torch.equal(back.cpu(), expected)
    assert not again.get().any().item()


def test_device_memory_is_not_overwritten_under_a_kernel_that_still_runs(store):
    """What is allocated for a copy back may be what a kernel of the compute stream was given and still reads."""
    stored = put_away(store, torch.zeros(NBYTES // 4, device=DEVICE))
    torch.accelerator.synchronize()
    simdevice.enable(bandwidth=SLOW)
    scratch = torch.ones(NBYTES // 4, device=DEVICE)
    address = scratch.data_ptr()
    total = scratch.sum()
    del scratch
    back = stored.get()
    assert back.data_ptr() == address, "the memory is used again"
    assert total.item() == NBYTES // 4
    assert not back.any().item()


def test_device_memory_is_not_overwritten_under_a_kernel_of_the_stream_that_asked(sim, store):
    """What was fetched ahead on one stream is computed with on another, and its memory goes back to the first."""
    stored = put_away(store, torch.ones(NBYTES // 4, device=sim))
    torch.accelerator.synchronize()
    stored.prefetch()
    simdevice.enable(bandwidth=SLOW)
    side = torch.Stream(device=sim)
    with side:
        back = stored.get()
        address, total = back.data_ptr(), back.sum()
        del back
    del stored
    scratch = torch.zeros(NBYTES // 4, device=sim)
    assert scratch.data_ptr() != address, "the side stream still reads it"
    torch.accelerator.current_stream().wait_stream(side)
    assert total.item() == NBYTES // 4
    assert not scratch.any().item()


def test_without_pinned_memory_it_goes_on_with_pageable_memory_and_counts_it(store, monkeypatch):
    empty = torch.empty

    def no_pinned_memory(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("out of locked memory")
        return empty(*args, **kwargs)

    pinned = simdevice.stats().pinned_bytes
    raw = random()
    expected = raw.cpu()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_pinned_memory)
        with pytest.warns(UserWarning, match=r"lowtide: .*pinned memory.*out of locked memory"):
            stored = put_away(store, raw)
    del raw
    assert store.usage().pageable_bytes >= NBYTES
    assert simdevice.stats().pinned_bytes == pinned
    assert stored.is_away
    assert torch.equal(stored.get().cpu(), expected)


def test_pieces_of_several_slabs_are_put_together(store):
    """A tensor larger than a slab is spread over several."""
    small = put_away(store, random())
    raw = random(24 << 20)
    expected = raw.cpu()
    stored = put_away(store, raw)
    del raw
    assert torch.equal(stored.get().cpu(), expected)
    assert small.is_away
    assert store.bytes_used == NBYTES + (24 << 20)


def test_a_tensor_in_host_memory_is_refused(store):
    store.require_useful(random(), "layers.0")
    with pytest.raises(OffloadError, match="in host memory already"):
        store.require_useful(torch.ones(8), "layers.0")
