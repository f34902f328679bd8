"""The virtual clock: three engines, exact figures, the same ones every time."""

from __future__ import annotations

import gc

import pytest
import torch

from lowtide import simdevice
from lowtide.errors import SimDeviceError

MATMUL = 2 * 100**3  # FLOPs of one 100x100 product


@pytest.fixture
def slow(sim) -> str:
    """A product of 100x100 takes 2 ms, a copy of 1 MB over the link 10 ms; launches are free."""
    simdevice.enable(flops=1e9, bandwidth=1e15, h2d=1e8, d2h=1e8, launch=0)
    simdevice.reset()
    return sim


def test_kernels_on_one_stream_add_up(slow):
    x = torch.ones(100, 100, device=slow)
    simdevice.reset()
    for _ in range(5):
        x @ x
    stats = simdevice.stats()
    assert stats.kernels == 5
    assert stats.flops == 5 * MATMUL
    assert stats.time == pytest.approx(5 * 2e-3, rel=1e-6)
    assert stats.busy_compute == pytest.approx(stats.time)


@pytest.mark.parametrize(
    ("left", "right", "splits", "products"),
    [
        ((64, 16), (2, 16, 32), [24, 64], 64 * 16 * 32),
        ((16, 64), (64, 32), [24, 64], 16 * 64 * 32),
        ((2, 16, 32), (32, 64), [24, 64], 16 * 32 * 64),
        ((2, 16, 32), (2, 32, 64), None, 2 * 16 * 32 * 64),
    ],
    ids=["rows", "inner dimension", "columns", "nothing is split"],
)
def test_a_grouped_product_counts_every_multiplication_once(slow, left, right, splits, products):
    """Torch makes plain products of it (pytorch/pytorch#161717), so the device never sees it whole."""
    a, b = (torch.ones(shape, device=slow, dtype=torch.bfloat16) for shape in (left, right))
    ends = None if splits is None else torch.tensor(splits, device=slow, dtype=torch.int32)
    simdevice.reset()
    torch._grouped_mm(a, b, offs=ends)
    assert simdevice.stats().flops == 2 * products


def test_kernels_on_two_streams_share_one_engine(slow):
    x = torch.ones(100, 100, device=slow)
    side = torch.Stream(device=slow)
    side.wait_stream(torch.accelerator.current_stream())
    simdevice.reset()
    y = x @ x
    with side:
        z = x @ x
    torch.accelerator.current_stream().wait_stream(side)
    assert simdevice.stats().time == pytest.approx(2 * 2e-3, rel=1e-6)
    side.wait_stream(torch.accelerator.current_stream())
    assert torch.equal(y, z)


def test_a_copy_overlaps_with_compute(slow):
    x = torch.ones(100, 100, device=slow)
    big = torch.ones(50_000, device=slow)  # 200 kB: 2 ms, as long as the product
    host = torch.empty(50_000, pin_memory=True)
    side = torch.Stream(device=slow)
    side.wait_stream(torch.accelerator.current_stream())
    simdevice.reset()
    with side:
        host.copy_(big, non_blocking=True)
    x @ x
    stats = simdevice.stats()
    assert stats.time == pytest.approx(2e-3, rel=1e-6)
    assert stats.busy_d2h == pytest.approx(2e-3)
    assert stats.busy_compute == pytest.approx(2e-3, rel=1e-6)
    torch.accelerator.synchronize()


def test_a_blocking_copy_does_not_overlap(slow):
    x = torch.ones(100, 100, device=slow)
    big = torch.ones(50_000, device=slow)
    simdevice.reset()
    big.cpu()
    x @ x
    assert simdevice.stats().time == pytest.approx(4e-3, rel=1e-6)


def test_the_link_is_full_duplex(slow):
    big = torch.ones(50_000, device=slow)
    up, down = torch.ones(50_000).pin_memory(), torch.empty(50_000, pin_memory=True)
    one, two = torch.Stream(device=slow), torch.Stream(device=slow)
    one.wait_stream(torch.accelerator.current_stream())
    simdevice.reset()
    with one:
        down.copy_(big, non_blocking=True)
    with two:
        copied = up.to(slow, non_blocking=True)
    assert simdevice.stats().time == pytest.approx(2e-3)
    torch.accelerator.synchronize()
    assert copied.numel() == 50_000


def test_work_that_is_ready_early_fills_the_gap(slow):
    """A kernel that waits for a long copy does not hold up an unrelated one that was submitted after it."""
    x = torch.ones(100, 100, device=slow)
    host = torch.ones(250_000).pin_memory()  # 10 ms
    copying, side = torch.Stream(device=slow), torch.Stream(device=slow)
    side.wait_stream(torch.accelerator.current_stream())
    simdevice.reset()
    with copying:
        arrived = host.to(slow, non_blocking=True)
    torch.accelerator.current_stream().wait_stream(copying)
    first = arrived[:10_000].view(100, 100) @ x
    with side:
        second = x @ x
        done = side.record_event()
    done.synchronize()
    assert simdevice.stats().time == pytest.approx(12e-3, rel=1e-6)
    assert torch.accelerator.current_stream().query() is False, "the host is at 2 ms, the first product ends at 12 ms"
    torch.accelerator.synchronize()
    assert first.shape == second.shape


def test_launches_cost_host_time(slow):
    simdevice.enable(launch=1e-3)
    x = torch.ones(10, device=slow)
    simdevice.reset()
    for _ in range(7):
        x.add_(1)
    torch.accelerator.synchronize()
    assert simdevice.stats().time == pytest.approx(7e-3, rel=1e-3)


def test_memory_bound_kernels_are_charged_by_bytes(sim):
    simdevice.enable(bandwidth=1e9, launch=0)
    x = torch.ones(1_000_000, device=sim)
    simdevice.reset()
    x + 1
    assert simdevice.stats().busy_compute == pytest.approx(8e6 / 1e9)


def test_only_distinct_bytes_are_charged(sim):
    simdevice.enable(bandwidth=1e9, launch=0)
    row, table = torch.ones(1000, device=sim), torch.ones(100_000, 10, device=sim)
    index = torch.tensor([3], device=sim)
    simdevice.reset()
    row.expand(1000, 1000).sum()
    assert simdevice.stats().busy_compute == pytest.approx((4000 + 4) / 1e9)
    simdevice.reset()
    torch.nn.functional.embedding(index, table)
    assert simdevice.stats().busy_compute == pytest.approx((8 + 40) / 1e9)


def test_reading_a_value_makes_the_host_wait(slow):
    x = torch.ones(100, 100, device=slow)
    start = torch.Event(device=slow, enable_timing=True)
    simdevice.reset()
    y = x @ x
    start.record()
    assert not start.query()
    y[0, 0].item()
    assert start.query()


def test_operators_with_data_dependent_shapes_make_the_host_wait(slow):
    x = torch.ones(100, 100, device=slow)
    simdevice.reset()
    y = x @ x
    event = torch.accelerator.current_stream().record_event()
    assert not event.query()
    torch.nonzero(y)
    assert event.query()


def test_an_event_from_before_a_reset_lies_in_the_past(slow):
    x = torch.ones(100, 100, device=slow)
    x @ x
    event = torch.accelerator.current_stream().record_event()
    simdevice.reset()
    side = torch.Stream(device=slow)
    side.wait_event(event)
    assert simdevice.stats().time == 0


def train(device: str) -> tuple[list[float], simdevice.Stats]:
    gc.collect()  # an optimizer may be part of a cycle, and the one of the run before still there
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 32).to(device)
    simdevice.reset()
    losses = []
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=device):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, simdevice.stats()


def test_the_same_program_gives_the_same_figures(sim):
    first, second = train(sim), train(sim)
    assert first == second
    assert first[1].time > 0
    assert first[1].copies > 0


def test_a_timeline_has_every_kernel_and_copy_where_the_clock_placed_it(slow):
    """A copy on a side stream runs beside a product; one that is not recorded is not there."""
    x = torch.ones(100, 100, device=slow)
    host = torch.empty(250_000, pin_memory=True)
    there = torch.ones(250_000, device=slow)
    side = torch.Stream(device=slow)
    side.wait_stream(torch.accelerator.current_stream())
    x @ x
    torch.accelerator.synchronize()
    simdevice.reset()
    with simdevice.timeline() as spans:
        assert spans == []
        x @ x
        with side:
            host.copy_(there, non_blocking=True)
        torch.accelerator.synchronize()
        there[:250].cpu()
    x @ x
    product, pinned, pageable = spans
    assert (product.kind, product.pinned, product.begin, product.end) == ("kernel", False, 0, pytest.approx(2e-3))
    assert (pinned.kind, pinned.pinned, pinned.begin, pinned.end) == ("d2h", True, 0, pytest.approx(1e-2))
    assert (pageable.kind, pageable.pinned) == ("d2h", False)
    assert pageable.begin == pytest.approx(pinned.end)
    assert pageable.end - pageable.begin == pytest.approx(1e-5)
    assert product.stream == pageable.stream != pinned.stream


def test_one_timeline_is_recorded_at_a_time(sim):
    with simdevice.timeline(), pytest.raises(SimDeviceError, match="recorded already"), simdevice.timeline():
        pass
    with simdevice.timeline() as spans:
        torch.ones(2, device=sim)
    assert [span.kind for span in spans] == ["kernel"]
