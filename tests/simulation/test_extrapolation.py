"""Patterns of layers, and stacks that are cut by them. What comes of it is in test_simulator.py."""

from __future__ import annotations

import pytest
from torch import nn

from lowtide.simulation.extrapolation import _find_pattern, find_stack, truncate


@pytest.mark.parametrize(
    ("forms", "pattern"),
    [("aaaaaaaa", (0, 1)), ("abababab", (0, 2)), ("daaaaaaa", (1, 1)), ("sssssfsssssfss", (0, 6)), ("abcd", (0, 4))],
)
def test_patterns_of_layers(forms: str, pattern: tuple[int, int]):
    first, period = _find_pattern(list(forms))
    assert first + period <= sum(pattern)
    assert all(forms[place] == forms[place - period] for place in range(first + period, len(forms)))


def test_a_stack_is_cut_with_its_pattern():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU() if place % 3 else nn.GELU()) for place in range(14))
    model = nn.ModuleDict({"layers": layers})
    stack = find_stack(model)
    assert stack is not None
    assert (stack.period, stack.short % 3, stack.long % 3) == (3, 14 % 3, 14 % 3), "they end as the whole does"
    truncate(model, stack, stack.long)
    assert len(layers) == stack.long
    assert all((stack.representative(place) - place) % 3 == 0 for place in range(1, 13))
