"""Copies between host and device: what is lazy, what waits."""

from __future__ import annotations

import signal

import pytest
import torch

from lowtide import simdevice
from support import expect_violation, run_python


def test_a_non_blocking_copy_to_the_device_runs_when_something_waits_for_it(sim):
    host = torch.randn(1000).pin_memory()
    side = torch.Stream(device=sim)
    with side:
        x = host.to(sim, non_blocking=True)
        copied = side.record_event()
    torch.accelerator.current_stream().wait_event(copied)
    assert torch.equal((x * 2).cpu(), host * 2)


def test_a_missing_wait_after_a_copy_to_the_device_reads_poison(sim):
    host = torch.randn(1000).pin_memory()
    side = torch.Stream(device=sim)
    with side:
        x = host.to(sim, non_blocking=True)
    assert (x * 2).cpu().isnan().all()
    expect_violation("read-race")


def test_a_non_blocking_copy_to_the_host_arrives_with_the_wait(sim):
    x = torch.randn(1000, device=sim)
    host = torch.empty(1000, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    assert torch.equal(host, x.cpu())


@pytest.mark.parametrize("read", [lambda t: t.isnan().all().item(), lambda t: t.numpy()[7] != t.numpy()[7]])
def test_the_host_reading_too_early_sees_poison_and_is_reported(sim, read):
    x = torch.randn(1000, device=sim)
    host = torch.empty(1000, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert read(host)
    found = simdevice.violations()
    assert [v.kind for v in found] == ["host-read"]
    assert found[0].bytes == 4000
    assert "D2H copy of 4000 bytes on stream 0" in str(found[0])
    torch.accelerator.synchronize()
    assert torch.equal(host, x.cpu()), "after the wait, the copy is there all the same"
    expect_violation("host-read")


def test_the_host_overwriting_a_source_too_early_is_reported(sim):
    host = torch.ones(1000).pin_memory()
    x = host.to(sim, non_blocking=True)
    host.fill_(2)
    assert simdevice.violations()[0].kind == "host-write"
    assert x.cpu().eq(2).all(), "the late copy picked up the new bytes"
    expect_violation("host-write")


def test_the_host_may_read_a_source_while_it_is_copied(sim):
    host = torch.ones(1000).pin_memory()
    x = host.to(sim, non_blocking=True)
    assert host.sum() == 1000
    assert x.cpu().eq(1).all()


def test_a_query_that_says_done_counts_as_a_wait(sim):
    host = torch.empty(1000, pin_memory=True)
    host.copy_(torch.ones(1000, device=sim), non_blocking=True)
    done = torch.accelerator.current_stream().record_event()
    while not done.query():
        pass
    assert host.sum() == 1000


def test_two_buffers_in_one_slab_are_told_apart(sim):
    slab = torch.zeros(2 * 4096, dtype=torch.uint8).pin_memory()
    first, second = slab.chunk(2)
    second.fill_(1)
    first.copy_(torch.full((4096,), 7, dtype=torch.uint8, device=sim), non_blocking=True)
    assert second.sum() == 4096, "reading the other buffer is fine"
    assert not simdevice.violations()
    assert first.sum() == 0
    expect_violation("host-read")
    assert first.eq(7).all()


def test_two_small_buffers_on_one_page_raise_no_false_alarm(sim):
    slab = torch.zeros(64, dtype=torch.uint8).pin_memory()
    slab[:32].copy_(torch.full((32,), 7, dtype=torch.uint8, device=sim), non_blocking=True)
    assert slab[32:].sum() == 0
    torch.accelerator.synchronize()
    assert slab[:32].eq(7).all()


def test_a_pinned_buffer_freed_under_a_copy_lives_until_the_copy_is_done(sim):
    simdevice.enable(h2d=1e6)
    before = simdevice.stats().pinned_bytes
    host = torch.randn(1024).pin_memory()
    expected = host.clone()
    x = host.to(sim, non_blocking=True)
    del host
    assert simdevice.stats().pinned_bytes - before == 4096
    assert torch.equal(x.cpu(), expected)
    assert simdevice.stats().pinned_bytes == before


@pytest.mark.parametrize("why", ["pageable", "dtype", "layout"])
def test_copies_that_need_a_temporary_make_the_host_wait(sim, why):
    x = torch.randn(32, 32, device=sim)
    host = torch.empty(32, 32, pin_memory=why != "pageable")
    if why == "dtype":
        host = host.double().pin_memory()
    if why == "layout":
        host = host.t()
    host.copy_(x, non_blocking=True)
    assert torch.equal(host.float(), x.cpu())


def test_bytes_over_the_link_are_counted_by_direction(sim):
    simdevice.reset()
    x = torch.ones(1000, dtype=torch.float64).to(sim)
    x[:100].cpu()
    stats = simdevice.stats()
    assert (stats.copies, stats.h2d_bytes, stats.d2h_bytes) == (2, 8000, 800)


def test_broadcast_copy(sim):
    x = torch.empty(3, 4, device=sim)
    x.copy_(torch.arange(4.0))
    assert torch.equal(x.cpu(), torch.arange(4.0).expand(3, 4))


def test_a_pageable_source_is_staged(sim):
    """The host may change it at once, as on CUDA; but another stream must wait for the copy."""
    host = torch.ones(1000)
    x = host.to(sim, non_blocking=True)
    host.fill_(2)
    assert x.cpu().eq(1).all()

    with torch.Stream(device=sim):
        y = host.to(sim, non_blocking=True)
    assert (y + 1).cpu().isnan().all()
    expect_violation("read-race")


def test_a_dimension_of_size_one_has_no_layout(sim):
    x = torch.ones(1000, 1, device=sim).t()
    host = torch.empty(1, 1000, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert host.isnan().all()
    expect_violation("host-read")


def test_a_real_segmentation_fault_still_ends_the_process(sim):
    done = run_python(
        "import ctypes, faulthandler, torch; from lowtide import simdevice; simdevice.enable()\n"
        "x = torch.ones(8, device='sim')\n"
        "hosts = [torch.empty(8, pin_memory=True) for _ in range(2)]\n"
        "hosts[0].copy_(x, non_blocking=True)\n"
        "faulthandler.enable()\n"
        "hosts[1].copy_(x, non_blocking=True)\n"
        "ctypes.string_at(8)"
    )
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.count("Segmentation fault") == 1
