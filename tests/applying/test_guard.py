"""The guard alarms when a region does nothing, and only then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.applying import region_runtime
from lowtide.errors import SilentNoOpError


class Skippable(nn.Module):
    """LayerDrop: a block that sometimes hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.skipped = False

    def forward(self, x):
        return x if self.skipped else x + self.inner(x).tanh()


class TwoOutputs(Skippable):
    """Its first output needs no recompute; the second does."""

    def forward(self, x):
        return x + 1, super().forward(x)


class OnlySums(Skippable):
    """Backward through it needs nothing that was saved."""

    def forward(self, x):
        return x + self.inner.bias


class Stack(nn.Module):
    def __init__(self, block=Skippable, count=3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def forward(self, x):
        outputs = [x]
        for layer in self.layers:
            result = layer(outputs[-1])
            outputs.append(result[-1] if isinstance(result, tuple) else result)
        return outputs


@pytest.fixture
def idle(monkeypatch):
    """An engine that silently does nothing."""
    monkeypatch.setattr(region_runtime, "run_region", lambda forward, args, kwargs, **_: forward(*args, **kwargs))


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 32, requires_grad=True)


def test_a_block_that_hands_its_input_on_owes_nothing(x):
    model = Stack()
    model.layers[1].skipped = True
    applied = lowtide.apply(model, "recompute")
    model(x)[-1].sum().backward()
    assert [region.recomputes for region in applied.report().regions] == [1, 0, 1]


def test_a_block_that_saves_nothing_owes_nothing(x):
    applied = lowtide.apply(model := Stack(OnlySums), "recompute")
    model(x)[-1].sum().backward()
    assert [(region.forwards, region.recomputes) for region in applied.report().regions] == [(1, 0)] * 3


def test_a_gradient_taken_at_a_regions_output_does_not_enter_the_region(x):
    applied = lowtide.apply(model := Stack(), "recompute")
    outputs = model(x)
    torch.autograd.grad(outputs[-1].sum(), outputs[-2])
    assert [region.recomputes for region in applied.report().regions] == [0, 0, 1]


@pytest.mark.parametrize("block", [Skippable, TwoOutputs])
def test_an_engine_that_does_nothing_is_named(idle, x, block):
    lowtide.apply(model := Stack(block), "recompute")
    with pytest.raises(SilentNoOpError, match=r"layers\.0.*expected a recompute"):
        model(x)[-1].sum().backward()


def test_it_looks_once(idle, x):
    lowtide.apply(model := Stack(), "recompute", strict=False)
    with pytest.warns(UserWarning, match="expected a recompute"):
        model(x)[-1].sum().backward()
    model(x)[-1].sum().backward()
