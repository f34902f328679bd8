"""The parts of a simulated step: values, lifetimes, the virtual clock, attention kernels."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

from lowtide.errors import InvalidValueError, PlanError
from lowtide.hardware.accelerators import Rates
from lowtide.recording import Owner
from lowtide.simulation.attention import Attention
from lowtide.simulation.clock import DEVICE, Clock, Stream
from lowtide.simulation.device import simulated_device
from lowtide.simulation.ledger import Ledger
from lowtide.simulation.optimizers import FusedAdamW

if TYPE_CHECKING:
    from collections.abc import Iterator

RATES = Rates(flops=1e12, single_flops=1e12, bandwidth=1e9, matmul=1, attention=1, attention_backward=1, memory=1)
KIB = 1024


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    clock = Clock(link_bytes_per_second=1e9, launch_seconds=0)
    ledger = Ledger(clock, RATES, DEVICE, rounding=1)
    with simulated_device(clock, Attention()), ledger:
        yield ledger


def live(ledger: Ledger) -> int:
    return sum(event.change for event in ledger.events if event.place == "device")


def test_every_storage_counts_from_its_first_operation_to_its_last_reference(ledger: Ledger):
    x = torch.empty(KIB, device=DEVICE)
    view = x[: KIB // 2]
    assert live(ledger) == 4 * KIB, "a view is no memory"
    y = x * 2
    assert live(ledger) == 8 * KIB
    del x
    assert live(ledger) == 8 * KIB, "the view holds it"
    del view, y
    assert live(ledger) == 0


def test_saved_tensors_live_as_long_as_the_graph(ledger: Ledger):
    weight = torch.nn.Parameter(torch.empty(KIB, device=DEVICE))
    loss = (weight * weight).exp().sum()
    assert live(ledger) == (4 + 4) * KIB + 4, "the weight, exp's result for its backward, and the loss"
    loss.backward()
    del loss
    assert live(ledger) == 8 * KIB, "the weight and its gradient"


def test_owners_can_change(ledger: Ledger):
    tensor = torch.empty(KIB, device=DEVICE)
    ledger.claim(tensor, "gradients", "layers.0")
    assert ledger.events[-1].change == 0
    assert ledger.events[-1].owner == Owner("gradients", "layers.0")


def test_integers_keep_their_values(ledger: Ledger):
    ids = torch.arange(6, device=DEVICE).reshape(2, 3)
    mask = ids > 3
    assert mask.any()
    assert mask.sum().item() == 2
    assert ids[mask].tolist() == [4, 5]
    assert ids.nonzero().shape == (5, 2)
    ids[0, 0] = 7
    assert ids.max().item() == 7
    assert torch.tensor([ids[0, 0], 1], device=DEVICE).tolist() == [7, 1]
    assert ledger.operations > 5


def test_what_weights_make_has_no_value(ledger: Ledger):
    unknown = torch.empty(4, 4, device=DEVICE) @ torch.empty(4, 4, device=DEVICE)
    with pytest.raises(PlanError, match="_local_scalar_dense on a float32 tensor of shape"):
        unknown.sum().item()
    with pytest.raises(PlanError, match="nonzero"):
        (unknown > 0).nonzero()
    assert ledger.operations


def test_experts_are_chosen_evenly(ledger: Ledger):
    scores = torch.empty(8, 4, device=DEVICE) @ torch.empty(4, 4, device=DEVICE)
    _, chosen = scores.topk(2, dim=-1)
    assert torch.bincount(chosen.flatten(), minlength=4).tolist() == [4, 4, 4, 4]
    assert ledger.operations


def test_results_of_repeated_operations_are_new_storages(ledger: Ledger):
    x = torch.empty(KIB, device=DEVICE)
    results = [x + 1 for _ in range(3)]
    assert len({result.untyped_storage()._cdata for result in results}) == 3
    assert live(ledger) == 4 * 4 * KIB


def test_kernels_wait_in_line_and_copies_go_beside_them():
    clock = Clock(link_bytes_per_second=100.0, launch_seconds=0)
    side = Stream(clock)
    clock.kernel(1.0, "matmul")
    done = clock.compute.record_event()
    side.wait_event(done)
    with side:
        clock.copy(200, "to_host", blocking=False)
    clock.kernel(1.5, "matmul")
    assert (clock.compute.time, side.time) == (2.5, 3.0), "the copy hides behind the second kernel"
    clock.compute.wait_stream(side)
    assert clock.synchronize() == 3.0
    assert clock.busy == {"matmul": 2.5, "to_host": 2.0}


def test_a_direction_of_the_link_carries_one_copy_at_a_time():
    clock = Clock(link_bytes_per_second=100.0, launch_seconds=0)
    first, second = Stream(clock), Stream(clock)
    for stream, direction in ((first, "to_host"), (second, "to_host"), (Stream(clock), "to_device")):
        with stream:
            clock.copy(100, direction, blocking=False)
    assert (first.time, second.time) == (1.0, 2.0)
    assert clock.synchronize() == 2.0


@pytest.mark.parametrize(
    ("dtype", "mask", "width", "has_flash", "kernel"),
    [
        (torch.bfloat16, False, 128, True, "flash"),
        (torch.bfloat16, False, 128, False, "efficient"),
        (torch.bfloat16, True, 128, True, "efficient"),
        (torch.float32, False, 64, True, "efficient"),
        (torch.bfloat16, False, 100, True, "math"),
    ],
)
def test_attention_takes_the_kernel_of_a_gpu(dtype: torch.dtype, mask: bool, width: int, has_flash: bool, kernel: str):
    attention = Attention(has_flash=has_flash)
    query = torch.empty(1, 2, 16, width, dtype=dtype, device=DEVICE)
    bias = torch.empty(1, 1, 16, 16, dtype=dtype, device=DEVICE) if mask else None
    out = attention(query, query, query, bias, is_causal=not mask)
    assert out.shape == query.shape
    assert attention.picked == {kernel: 1}


def test_an_unknown_kernel_is_refused():
    with pytest.raises(InvalidValueError, match="unknown attention kernel 'flesh'"):
        Attention("flesh")


def test_nothing_stays_patched():
    before = (torch.Stream, torch.Event, torch.tensor, torch.nn.functional.scaled_dot_product_attention)
    with contextlib.suppress(KeyboardInterrupt), simulated_device(Clock(), Attention()):
        assert torch.Stream is not before[0]
        raise KeyboardInterrupt
    assert (torch.Stream, torch.Event, torch.tensor, torch.nn.functional.scaled_dot_product_attention) == before


def test_flash_attention_takes_a_workspace_in_backward(ledger: Ledger):
    """Float32 sums of the query's gradient and of the rows, and keys and values for all heads of grouped queries."""
    query = torch.empty(1, 4, 256, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    key = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    out.backward(torch.empty_like(out))
    taken = [event.change for event in ledger.events if event.owner.kind == "workspace" and event.change > 0]
    assert taken == [4 * 256 * (64 + 1) * 4 + 2 * 4 * 256 * 64 * 2]


def test_efficient_attention_takes_a_workspace_in_backward(ledger: Ledger):
    query = torch.empty(1, 2, 64, 32, device=DEVICE, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    out.backward(torch.empty_like(out))
    taken = [event.change for event in ledger.events if event.owner.kind == "workspace" and event.change > 0]
    assert taken == [2 * 64 * 4], "in float32 the gradient itself is the sum"


def test_a_quantized_weight_is_unpacked_for_each_product(ledger: Ledger):
    weight = torch.empty(64, 64, dtype=torch.bfloat16, device=DEVICE)
    ledger.quantized.add(weight.untyped_storage()._cdata)
    _ = torch.empty(8, 64, dtype=torch.bfloat16, device=DEVICE) @ weight.t()
    taken = [event.change for event in ledger.events if event.owner.kind == "workspace" and event.change > 0]
    assert taken == [64 * 64 * 2]


@pytest.mark.parametrize(("causal", "share"), [(True, 0.5), (False, 1.0)])
def test_causal_attention_does_half_of_the_square(ledger: Ledger, causal: bool, share: float):
    query = torch.empty(1, 2, 8192, 64, dtype=torch.bfloat16, device=DEVICE)
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
    assert ledger.clock.busy["attention"] == pytest.approx(share * 4 * 2 * 8192**2 * 64 / RATES.flops)


def test_what_a_kernel_overwrites_is_not_read(ledger: Ledger):
    target, source = torch.empty(KIB, device=DEVICE), torch.empty(KIB, dtype=torch.bfloat16, device=DEVICE)
    target.copy_(source)
    read_and_written = 2 * KIB + 4 * KIB
    assert ledger.clock.busy["memory"] == pytest.approx(read_and_written / RATES.bandwidth)
    target.zero_()
    target.fill_(1.0)
    assert ledger.clock.busy["memory"] == pytest.approx((read_and_written + 2 * 4 * KIB) / RATES.bandwidth)
    target.add_(source)
    assert ledger.clock.busy["memory"] == pytest.approx((2 * read_and_written + 3 * 4 * KIB) / RATES.bandwidth)


@pytest.mark.parametrize(("state_dtype", "width"), [(None, 4), (torch.uint8, 1)])
def test_fused_adamw_reads_gradients_and_writes_all_else(ledger: Ledger, state_dtype: torch.dtype | None, width: int):
    weight = torch.nn.Parameter(torch.empty(KIB, device=DEVICE))
    optimizer = FusedAdamW([weight], state_dtype)
    optimizer.step()
    assert not ledger.clock.busy["memory"], "without a gradient there is nothing to do"
    weight.grad = torch.empty_like(weight)
    before = live(ledger)
    optimizer.step()
    weights, states = 4 * KIB, 2 * width * KIB
    assert ledger.clock.busy["memory"] == pytest.approx((2 * weights + weights + 2 * states) / RATES.bandwidth)
    assert live(ledger) == before, "it makes nothing"


def test_logits_are_named(ledger: Ledger):
    ledger.logits_width = 100
    logits = torch.empty(8, 100, device=DEVICE)
    other = torch.empty(8, 99, device=DEVICE)
    assert [event.owner.kind for event in ledger.events if event.change > 0] == ["logits", "activations"]
    del logits, other
