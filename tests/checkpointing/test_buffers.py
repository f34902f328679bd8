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
