"""Streams and events through torch's generic API."""

from __future__ import annotations

import torch

from lowtide import simdevice


def test_sim_is_torchs_accelerator(sim):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 1
    assert torch.get_device_module("sim") is torch.sim


def test_a_stream_is_current_inside_its_context(sim):
    default = torch.accelerator.current_stream()
    assert default == torch.sim.default_stream()
    side = torch.Stream(device=sim)
    with side:
        assert torch.accelerator.current_stream() == side
        with torch.sim.stream(default):
            assert torch.sim.current_stream() == default
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_stream() == default


def test_streams_come_from_a_pool_of_32(sim):
    streams = [torch.Stream(device=sim) for _ in range(33)]
    assert len({s.stream_id for s in streams[:32]}) == 32
    assert streams[32] == streams[0]
    assert all(s.stream_id != 0 for s in streams)


def test_an_event_is_done_once_virtual_time_has_passed_it(sim):
    simdevice.enable(d2h=1e6)
    host = torch.empty(1000, pin_memory=True)
    source = torch.ones(1000, device=sim)
    event = torch.Event(device=sim)
    assert event.query(), "never recorded"
    host.copy_(source, non_blocking=True)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert host.sum() == 1000


def test_a_stream_is_idle_after_its_work(sim):
    simdevice.enable(flops=1e6)
    side = torch.Stream(device=sim)
    with side:
        torch.ones(100, 100, device=sim) @ torch.ones(100, 100, device=sim)
    assert not side.query()
    side.synchronize()
    assert side.query()


def test_elapsed_time_is_virtual(sim):
    simdevice.enable(flops=1e9)
    x = torch.ones(100, 100, device=sim)
    start, end = (torch.Event(device=sim, enable_timing=True) for _ in range(2))
    start.record()
    x @ x
    end.record()
    end.synchronize()
    assert abs(start.elapsed_time(end) - 2e6 / 1e9 * 1e3) < 0.01


def test_a_re_recorded_event_stands_for_its_last_point(sim):
    side = torch.Stream(device=sim)
    event = torch.Event(device=sim)
    x = torch.ones(10, device=sim)
    event.record()
    x.mul_(2)
    event.record()
    side.wait_event(event)
    with side:
        y = x + 1
    torch.accelerator.current_stream().wait_stream(side)
    assert y.sum().item() == 30
    side.wait_stream(torch.accelerator.current_stream())


def test_backward_runs_on_the_stream_of_forward(sim):
    """The autograd engine switches streams and synchronises; the detector checks that it does so correctly."""
    weight = torch.randn(50, 50, device=sim, requires_grad=True)
    x = torch.randn(50, 50, device=sim)
    side = torch.Stream(device=sim)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        loss = (x @ weight).square().sum()
        x.record_stream(side)
    loss.backward()
    expected = 2 * x.cpu().t() @ (x.cpu() @ weight.detach().cpu())
    torch.testing.assert_close(weight.grad.cpu(), expected, rtol=1e-4, atol=1e-3)
    torch.accelerator.synchronize()


def test_two_threads_have_their_own_current_stream(sim):
    import threading

    side = torch.Stream(device=sim)
    seen = []
    with side:
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream().stream_id))
        thread.start()
        thread.join()
    assert seen == [0]
