"""The device heap: cap, poison, accounting."""

from __future__ import annotations

import gc

import pytest
import torch

from lowtide import simdevice
from support import run_python


@pytest.fixture(autouse=True)
def _nothing_left_in_cycles():
    """What an earlier test left in a cycle would be freed, and counted, in the middle of these."""
    gc.collect()


def test_allocation_beyond_the_cap_raises_torchs_own_error_with_all_three_figures(sim):
    simdevice.enable(memory="1MiB")
    kept = torch.empty(256 * 1024, dtype=torch.uint8, device=sim)
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 1048576 bytes, 262144 bytes .*capacity is 1048576"):
        torch.empty(1024 * 1024, dtype=torch.uint8, device=sim)
    assert simdevice.stats().ooms == 1
    assert kept.numel() == 256 * 1024


def test_memory_is_usable_again_after_an_out_of_memory_error(sim):
    simdevice.enable(memory="1MiB")
    block = torch.empty(1024 * 1024, dtype=torch.uint8, device=sim)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512, dtype=torch.uint8, device=sim)
    del block
    assert torch.ones(1024 * 255, device=sim).sum().item() == 1024 * 255


def test_the_result_of_a_kernel_counts_against_the_cap(sim):
    x = torch.ones(1024, device=sim)
    simdevice.enable(memory=simdevice.stats().live_bytes + 512)
    with pytest.raises(torch.OutOfMemoryError):
        x.expand(1024, 1024).contiguous()
    with pytest.raises(torch.OutOfMemoryError):
        torch.nonzero(x.expand(4, 1024))


def test_fresh_memory_is_nan(sim):
    assert torch.empty(1000, device=sim).isnan().all().item()
    assert torch.empty(1000, device=sim, dtype=torch.bfloat16).isnan().all().item()
    assert torch.empty(10, device=sim, dtype=torch.int64).eq(-1).all().item()
    assert torch.empty(1000, pin_memory=True).isnan().all()


def test_memory_is_poisoned_again_when_it_is_reused(sim):
    first = torch.ones(1000, device=sim)
    address = first.data_ptr()
    del first
    second = torch.empty(1000, device=sim)
    assert second.data_ptr() == address, "the backing memory should have been reused"
    assert second.isnan().all().item()


def test_freed_memory_reads_as_nan_through_a_stale_pointer(sim):
    import ctypes

    block = torch.ones(1000, device=sim)
    address = block.data_ptr()
    del block
    assert ctypes.string_at(address, 4000) == b"\xff" * 4000


def test_live_and_peak_bytes_are_exact(sim):
    gc.collect()
    before = simdevice.stats().live_bytes
    a = torch.empty(1, device=sim)
    b = torch.empty(1024, device=sim)
    assert simdevice.stats().live_bytes - before == 512 + 4096
    del b
    stats = simdevice.stats()
    assert stats.live_bytes - before == 512
    assert stats.peak_bytes - before == 512 + 4096
    del a
    simdevice.reset()
    assert simdevice.stats().peak_bytes == simdevice.stats().live_bytes == before


def test_views_and_saved_tensors_hold_their_block(sim):
    before = simdevice.stats().live_bytes
    base = torch.ones(1024, device=sim)
    view = base[512:]
    del base
    assert simdevice.stats().live_bytes - before == 4096
    del view
    assert simdevice.stats().live_bytes == before


def test_pinned_bytes_are_rounded_to_powers_of_two(sim):
    before = simdevice.stats().pinned_bytes
    buffer = torch.empty(1025, pin_memory=True)
    assert buffer.is_pinned()
    assert simdevice.stats().pinned_bytes - before == 8192
    del buffer
    stats = simdevice.stats()
    assert stats.pinned_bytes == before
    assert stats.peak_pinned_bytes - before == 8192


def test_accelerator_memory_functions_agree_with_stats(sim):
    x = torch.empty(1 << 20, device=sim)
    stats = simdevice.stats()
    assert torch.accelerator.memory_allocated() == stats.live_bytes
    assert torch.accelerator.max_memory_allocated() == stats.peak_bytes
    assert torch.accelerator.memory_reserved() == stats.live_bytes
    free, total = torch.accelerator.get_memory_info()
    assert (free, total) == (512 * 1024**2 - stats.live_bytes, 512 * 1024**2)
    assert torch.sim.memory_allocated() == stats.live_bytes
    del x
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == simdevice.stats().live_bytes


def test_record_stream_keeps_a_block_until_the_other_stream_is_done(sim):
    simdevice.enable(d2h=1e6)
    x = torch.randn(1000, device=sim)
    expected = x.cpu()
    host = torch.empty(1000, pin_memory=True)
    side = torch.Stream(device=sim)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    live = simdevice.stats().live_bytes
    del x
    assert simdevice.stats().live_bytes == live, "still in use"
    side.synchronize()
    assert simdevice.stats().live_bytes == live - 4096
    assert torch.equal(host, expected)


def test_memory_held_by_record_stream_is_waited_for_before_running_out(sim):
    simdevice.enable(memory=simdevice.stats().live_bytes + (1 << 20), d2h=1e3)
    x = torch.ones(1 << 18, device=sim)
    host = torch.empty(1 << 18, pin_memory=True)
    side = torch.Stream(device=sim)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    del x
    again = torch.empty(1 << 18, device=sim)
    assert again[0].item() != again[0].item()
    assert simdevice.stats().time > (1 << 20) / 1e3, "the allocator waited for the copy"


def test_growing_a_tensor_keeps_its_bytes(sim):
    x = torch.arange(4.0, device=sim)
    x.resize_(300)
    assert x[:4].tolist() == [0, 1, 2, 3]
    assert x[4:].isnan().all().item()


def test_there_is_one_device(sim):
    assert torch.empty(1, device="sim:0").device == torch.device("sim:0")
    with pytest.raises(RuntimeError, match="one device per process"):
        torch.empty(1, device="sim:1")


def test_growing_a_tensor_waits_for_a_copy_into_it(sim):
    x = torch.empty(10, device=sim)
    x.copy_(torch.ones(10).pin_memory(), non_blocking=True)
    x.resize_(2000)
    assert x[:10].sum().item() == 10


def test_device_module_tells_live_from_peak(sim):
    before = torch.sim.memory_allocated()
    block = torch.empty(1 << 20, device=sim)
    del block
    assert torch.sim.memory_allocated() == before
    assert torch.sim.max_memory_allocated() == before + (1 << 22)
    assert torch.sim.get_device_properties().total_memory == 512 * 1024**2
    assert isinstance(torch.sim.Stream(), torch.Stream)


def test_host_allocator_functions(sim):
    torch.accelerator.empty_host_cache()
    buffer = torch.empty(1024, pin_memory=True)
    assert buffer.is_pinned()
    torch.accelerator.empty_host_cache()


def test_memory_held_by_record_stream_counts_no_longer_than_it_must(sim):
    before = torch.accelerator.memory_allocated()
    x = torch.ones(1 << 20, device=sim)
    side = torch.Stream(device=sim)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = x.sum()
    x.record_stream(side)
    del x
    side.synchronize()
    assert torch.accelerator.memory_allocated() - before == 512
    assert total.item() == 1 << 20


FORK = """
import os, threading, time, torch
from lowtide import simdevice
simdevice.enable(memory="1GiB")
x, host = torch.ones(1 << 22, device="sim"), torch.empty(1 << 22)
busy = True
def work():
    while busy:
        host.copy_(x)
thread = threading.Thread(target=work)
thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        simdevice.stats()
        torch.empty(8, pin_memory=True)
        os._exit(0)
    deadline = time.time() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.time() > deadline:
            os.kill(child, 9)
            print("hung")
            break
        time.sleep(0.01)
busy = False
thread.join()
print("done")
"""


def test_a_fork_while_another_thread_uses_the_device(sim):
    assert run_python(FORK).stdout.split() == ["done"]
