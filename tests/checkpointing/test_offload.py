"""`lowtide.offload`: saved tensors wait on the host, without recompute."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import simdevice
from lowtide.errors import InPlaceError, InvalidValueError, OffloadError
from lowtide.stores import HostStore
from models.chains import Twice
from support.devices import DEVICE


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*layers).to(DEVICE)


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(128, 64).to(DEVICE)


def train(net, context=None):
    net.zero_grad()
    x = batch()
    torch.manual_seed(2)
    with context or torch.enable_grad():
        loss = net(x).square().mean()
    loss.backward()
    return [p.grad.cpu() for p in net.parameters()]


def test_gradients_are_bit_identical_and_bytes_move(sim):
    net = model()
    expected = train(net)
    simdevice.reset()
    context = lowtide.offload("host")
    assert all(torch.equal(a, b) for a, b in zip(train(net, context), expected, strict=True))
    assert context.ledger.packed_bytes > 4 * 128 * 256 * 4
    assert context.ledger.restored_bytes == context.ledger.packed_bytes
    assert context.ledger.unmovable_bytes == 0, "weights and small tensors need not move"
    assert simdevice.stats().pinned_bytes == 0


class Chooses(nn.Module):
    """Saves a table that is in host memory, beside what is on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.table = torch.arange(2048) % 128

    def forward(self, x):
        return self.inner(x).tanh()[self.table][:128]


@pytest.mark.parametrize("policy", ["offload", "recompute+offload"])
def test_a_table_in_host_memory_stays_there(device, policy):
    net = nn.Sequential(*(Chooses() for _ in range(4))).to(DEVICE)
    expected = train(net)
    with lowtide.apply(net, policy) as applied:
        assert all(torch.equal(a, b) for a, b in zip(train(net), expected, strict=True))
        assert sum(region.packed_bytes for region in applied.report().regions) > 0


def test_a_model_in_host_memory_is_refused(device):
    """By the context as it ends, by a policy after the first block: there was nothing that could leave."""
    net, x = model().cpu(), torch.randn(128, 64)

    def forward():
        with lowtide.offload("host"):
            net(x)

    with pytest.raises(OffloadError, match="in host memory already"):
        forward()
    with lowtide.apply(net, "offload"), pytest.raises(OffloadError, match="in host memory already"):
        net(x)


@pytest.mark.parametrize("policy", ["offload", "recompute+offload"])
def test_a_part_in_host_memory_is_refused_by_name(sim, policy):
    """As a device map leaves it: most parts on the accelerator, the last one not."""

    class OnTheCPU(nn.Linear):
        def forward(self, x):
            return super().forward(x.cpu()).tanh() if self.moves else super().forward(x).tanh()

    net = nn.Sequential(*(OnTheCPU(64, 64) for _ in range(4))).to(DEVICE)
    net[2].cpu()
    net[3].cpu()
    for index, part in enumerate(net):
        part.moves = index == 2

    def run():
        return net(torch.randn(128, 64, device=DEVICE))

    name = "2" if policy == "offload" else "3"  # the input of the other one is still on the device
    with (
        lowtide.apply(net, policy, regions=["OnTheCPU"]),
        pytest.raises(OffloadError, match=rf"region '{name}' cannot be offloaded.*'{name}: recompute'"),
    ):
        run()
    rules = "; ".join(f"{index}: recompute" for index in (2, 3))
    with lowtide.apply(net, f"{policy}; {rules}", regions=["OnTheCPU"]):
        run().sum().backward()


def test_a_result_in_host_memory_does_not_keep_its_graph_alive(device):
    """Saved as the output of its operator, it leads to the node that holds what was packed."""
    store = lowtide.HostStore()
    with lowtide.offload(store):
        x = batch().requires_grad_()
        y = x.exp().sin().cpu().tanh().sum()
    assert store.bytes_used > 0
    del y
    assert store.bytes_used == 0


def test_it_frees_device_memory(sim):
    net, left = model(), {}
    for name, context in (("plain", torch.enable_grad()), ("offload", lowtide.offload())):
        gc.collect()
        torch.accelerator.synchronize()
        before = simdevice.stats().live_bytes
        with context:
            y = net(batch())
        torch.accelerator.synchronize()
        left[name] = simdevice.stats().live_bytes - before
        del y
    assert left["offload"] < 0.35 * left["plain"]


def test_views_of_one_tensor_are_moved_once(sim):
    """Queries, keys and values of one projection: three views with gaps, one run of bytes."""
    x = batch().requires_grad_()
    simdevice.reset()
    with lowtide.offload():
        packed = torch.cat([x, x, x], -1)
        q, k, v = packed.unflatten(-1, (3, 64)).unbind(1)
        y = (q.sin() * k.cos() + v.exp()).tanh()
    y.sum().backward()
    stats = simdevice.stats()
    one = 128 * 64 * 4
    assert stats.d2h_bytes <= (3 + 4) * one, "the projection once, and the results that autograd saves"
    assert x.grad.isfinite().all().item()


class Projections(nn.Module):
    """Three products of one input: autograd saves it three times, and its gradient is summed before the next."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        first, second, third = (part(x).tanh() for part in self.parts)
        return x + first * second + third


def test_bytes_that_several_saved_come_back_once(sim):
    torch.manual_seed(0)
    net = nn.Sequential(*(Projections() for _ in range(4))).to(sim)
    expected = train(net)
    simdevice.reset()
    context = lowtide.offload("host")
    assert all(torch.equal(a, b) for a, b in zip(train(net, context), expected, strict=True))
    assert context.ledger.restored_bytes == context.ledger.packed_bytes > 0


def test_inside_a_checkpoint_it_does_nothing(sim):
    net, x = model(), batch()
    simdevice.reset()

    def inner(y):
        with lowtide.offload():
            return net(y)

    checkpoint(inner, x, use_reentrant=False).sum().backward()
    assert simdevice.stats().d2h_bytes == 0


def test_a_second_read_of_saved_tensors_works(device):
    """mamba#1020: a backward that reads `ctx.saved_tensors` twice."""

    x = batch().requires_grad_()
    with lowtide.offload():
        y = Twice.apply(x * 1)
        z = Twice.apply(y)
    z.sum().backward()
    assert torch.allclose(x.grad, 4 * x.detach() ** 3)


def test_in_place_changes_are_refused(device):
    x = batch().requires_grad_()
    with lowtide.offload():
        hidden = x * 1
        y = hidden.exp() * hidden
    hidden.add_(1)
    with pytest.raises(InPlaceError):
        y.sum().backward()


def test_a_store_can_be_shared_and_limited(device):
    net, store = model(), HostStore(limit="64KiB")
    expected = train(net)
    context = lowtide.offload(store)
    assert all(torch.equal(a, b) for a, b in zip(train(net, context), expected, strict=True))
    assert context.ledger.declined_bytes > 0
    assert store.peak_bytes <= 64 * 1024


def test_it_needs_a_store():
    with pytest.raises(InvalidValueError, match="needs a store"):
        lowtide.offload(None)
