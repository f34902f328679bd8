"""Choices for regions become rules of a policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowtide
from lowtide.errors import InvalidValueError
from lowtide.policy.pattern import matches
from lowtide.policy.rules import as_policy


@given(st.integers(0, 120), st.integers(0, 120))
def test_a_range_fits_its_layers_and_nothing_else(first: int, last: int):
    first, last = sorted((first, last))
    fitting = [number for number in range(200) if matches(f"layers.{first}-{last}", f"model.layers.{number}")]
    assert fitting == list(range(first, last + 1))


def test_a_range_is_of_stacks_whose_name_ends_so():
    assert matches("layers.0-3", "layers.3")
    assert matches("text.layers.0-3", "base.text.layers.3")
    assert matches("0-3", "2")
    assert not matches("layers.0-3", "model.more_layers.3")
    assert not matches("layers.0-3", "model.layers.3.mlp")
    assert not matches("0-3", "layers.2")
    with pytest.raises(InvalidValueError, match="smaller number first"):
        lowtide.Policy.parse("recompute; layers.3-0: none")


def test_a_choice_becomes_a_policy():
    names = [f"base.visual.blocks.{place}" for place in range(4)] + [f"base.text.layers.{place}" for place in range(20)]
    choice = dict.fromkeys(names, "recompute")
    choice |= dict.fromkeys(names[:4], "none") | dict.fromkeys(names[4:9], "offload")
    policy = as_policy(choice, "tile")
    assert policy.tile == ("attention", "mlp", "loss")
    assert [pattern for pattern, _ in policy.overrides] == ["blocks.0-3", "layers.0-4"]
    for name in names:
        chosen = policy.for_region(name)
        assert (
            str(chosen).replace("tile(mlp)", "tile").replace("tile", choice[name] if choice[name] == "none" else "tile")
        )
        assert chosen.recompute == (choice[name] == "recompute")
        assert (chosen.offload is not None) == (choice[name] == "offload")
        assert "mlp" in chosen.tile
