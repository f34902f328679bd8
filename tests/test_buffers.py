"""A recomputation changes no buffer, and reads what forward read."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.buffers import PACKED_BYTES


class Counts(nn.Module):
    """Its output depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs += 1
        return torch.tanh(self.linear(x)) * self.runs.clone()


class Averages(Counts):
    """It puts another tensor in its buffer's place."""

    def forward(self, x):
        self.runs = 0.9 * self.runs + x.detach().mean() + 1
        return torch.tanh(self.linear(x)) * self.runs


class GrowingTable(Counts):
    """RoPE's cosines in many a model's own code: a longer table when it is needed, and a note of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.make(2)

    def make(self, length: int) -> None:
        self.length = length
        self.register_buffer("table", torch.arange(length).double().cos()[:, None], persistent=False)

    def forward(self, x):
        if len(x) > self.length:
            self.make(len(x))
        return torch.tanh(self.linear(x)) * self.table[: len(x)]


class MeasuresOnce(Counts):
    """Takes its scale from the first batch."""

    is_ready = False

    def forward(self, x):
        if not self.is_ready:
            self.runs, self.is_ready = x.detach().std(), True
        return torch.tanh(self.linear(x)) / self.runs


class Forgets(Counts):
    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.runs = None
        return y


class Expands(Counts):
    """Its buffer becomes a view in which many elements are one."""

    def forward(self, x):
        self.runs = torch.ones(1, dtype=x.dtype).expand(8)
        return torch.tanh(self.linear(x)) * self.runs


def blocks() -> dict[str, nn.Module]:
    return {
        "batch norm": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8, momentum=None)),
        "spectral norm": nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh()),
        "counter": Counts(),
        "replaced": Averages(),
    }


def trained(kind: str, run, steps: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    block = blocks()[kind].double()
    for _ in range(steps):
        run(block, torch.randn(5, 8, dtype=torch.double)).square().sum().backward()
    return [p.grad for p in block.parameters()], [b.clone() for b in block.buffers()]


@pytest.mark.parametrize("kind", blocks())
def test_buffers_and_gradients_are_those_of_plain_training(kind):
    expected = trained(kind, lambda block, x: block(x))
    ours = trained(kind, lowtide.checkpoint)
    torch_own = trained(kind, lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(expected[0], ours[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected[1], ours[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(expected[1], torch_own[1], strict=True)), (
        "torch's own does it twice"
    )


@pytest.mark.parametrize("block", [GrowingTable, MeasuresOnce, Forgets, Expands])
def test_what_a_module_remembers_about_a_buffer_that_it_replaces_goes_with_it(block):
    def gradients(run):
        torch.manual_seed(0)
        module = block().double()
        for tokens in (2, 5, 3, 5):
            run(module, torch.randn(tokens, 8, dtype=torch.double)).square().sum().backward()
        return [p.grad for p in module.parameters()], [b for b in module.buffers() if b is not None]

    ours, plain = gradients(lowtide.checkpoint), gradients(lambda module, x: module(x))
    assert all(torch.equal(a, b) for a, b in zip(ours[0] + ours[1], plain[0] + plain[1], strict=True))


@pytest.mark.parametrize("kind", blocks())
def test_two_forwards_before_backward(kind):
    def both(run):
        torch.manual_seed(0)
        block = blocks()[kind].double()
        torch.manual_seed(1)
        x, y = torch.randn(2, 5, 8, dtype=torch.double)
        (run(block, x).square().sum() + run(block, y).square().sum()).backward()
        return [p.grad for p in block.parameters()] + list(block.buffers())

    ours = both(lowtide.checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(ours, both(lambda block, x: block(x)), strict=True))


def wrapped(forward):
    """What accelerate's hooks, and many others, make of a forward."""

    @functools.wraps(forward)
    def run(*args, **kwargs):
        return forward(*args, **kwargs)

    return run


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_applied(is_wrapped):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)))
    if is_wrapped:
        for block in net:
            block.forward = wrapped(block.forward)
    x = torch.randn(5, 8)
    with lowtide.apply(net, "recompute", regions=["0", "1", "2"]) as applied:
        net(x).sum().backward()
        assert [region.recomputes for region in applied.report().regions] == [1, 1, 1]
    assert [int(block[1].num_batches_tracked) for block in net] == [1, 1, 1]


class ClonedBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.clone.default:
            self.bytes += result.nbytes
        return result


@pytest.mark.parametrize("run", [lowtide.checkpoint, lambda block, x: lowtide.tile(block, x, tokens=2)])
def test_packed_weights_are_not_copied(run):
    """GPTQ and AWQ keep theirs in buffers."""
    block = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    block.register_buffer("packed", torch.zeros(PACKED_BYTES, dtype=torch.uint8))
    block.register_buffer("count", torch.zeros((), dtype=torch.int64))
    with ClonedBytes() as cloned:
        run(block, torch.randn(1, 8, 8, requires_grad=True)).sum().backward()
    assert 0 < cloned.bytes < PACKED_BYTES


class CountsTokens(Counts):
    """A count of tokens, in another tensor each time, which its output does not depend on."""

    def forward(self, x):
        self.runs = self.runs + len(x)
        return torch.tanh(self.linear(x))


def test_a_tile_that_runs_again_leaves_the_buffer_that_forward_made():
    block = CountsTokens()
    out = lowtide.tile(block, torch.randn(10, 8, requires_grad=True), tokens=3)
    made = block.runs
    out.sum().backward()
    assert block.runs is made
    assert made == 10
