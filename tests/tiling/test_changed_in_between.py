"""What a program changes between forward and backward: a tile that is run again finds what it found, or is refused."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import LowtideError

WIDTH = 8


class Net(nn.Module):
    """A token-wise module with dropout, a number in an attribute, and an attribute that is no number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=torch.double) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.factor = 2.0
        self.order = ["up", "down"]

    def forward(self, x):
        for name in self.order:
            x = self.get_submodule(name)(x).sin() * self.factor
        return self.dropout(x)


def gradients(change):
    net, x = Net(), torch.linspace(-1, 1, 10 * WIDTH, dtype=torch.double).view(10, WIDTH)
    torch.manual_seed(1)
    y = lowtide.tile(net, x, tokens=3)
    change(net)
    y.square().sum().backward()
    return [weight.grad for weight in net.parameters()]


def add_hook(net):
    net.up.register_forward_hook(lambda _module, _args, out: out * 3)


def set_factor(net):
    net.factor = 5.0


def set_dropout(net):
    net.dropout.p = 0.1


@pytest.mark.parametrize("change", [nn.Module.eval, add_hook, set_factor, set_dropout])
def test_a_tile_finds_what_it_found(change):
    expected, ours = gradients(lambda _net: None), gradients(change)
    assert all(torch.equal(one, two) for one, two in zip(ours, expected, strict=True))


def test_what_was_changed_stays_changed():
    net = Net()
    y = lowtide.tile(net, torch.ones(10, WIDTH, dtype=torch.double), tokens=3)
    set_factor(net.eval())
    add_hook(net)
    y.sum().backward()
    assert (net.training, net.dropout.training, net.factor, len(net.up._forward_hooks)) == (False, False, 5.0, 1)


class Two(nn.Module):
    """Uses one of two projections of different widths: as many tensors are saved either way."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.SiLU(), nn.Linear(width, WIDTH)) for width in (4, 6)
        )
        self.active = types.SimpleNamespace(part=0)  # nobody looks into objects

    def forward(self, x):
        return self.parts[self.active.part](x)


def test_as_many_tensors_of_other_shapes_are_refused():
    net = Two()
    y = lowtide.tile(net, torch.randn(10, WIDTH), tokens=3)
    net.active.part = 1
    with pytest.raises(LowtideError, match=r"saved a tensor of \(\d, \d\) .* in forward and one of \(\d, \d\) "):
        y.sum().backward()
