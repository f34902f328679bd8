"""What is tiled: a module, a method of one, or any other function, whose weights are found or not there at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.tiling.tiled_function import TiledFunction


class Doubler:
    """No module."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("function", [torch.sin, Doubler().run, lambda x: x + 1], ids=["builtin", "method", "lambda"])
def test_a_function_without_a_module(function):
    x = torch.randn(7, 3, requires_grad=True)
    expected = function(x)
    assert TiledFunction(function).module is None
    assert TiledFunction(function).weights() == []
    assert torch.equal(lowtide.tile(function, x, tokens=2), expected)


def test_a_module_is_its_own_function_and_owns_its_methods():
    linear, other = nn.Linear(3, 3), nn.Linear(3, 3)
    assert TiledFunction(linear).module is linear
    assert TiledFunction(linear.forward).module is linear
    assert TiledFunction(linear.forward, other).module is other, "as named"
    assert TiledFunction(lambda x: x, other).module is other
    assert [weight.name for weight in TiledFunction(linear).weights()] == ["weight", "bias"]
