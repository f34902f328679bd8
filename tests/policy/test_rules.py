"""Choices for regions become rules of a policy."""

from __future__ import annotations

import fnmatch

from hypothesis import given
from hypothesis import strategies as st

from lowtide.policy.rules import as_policy, range_globs


@given(st.integers(0, 120), st.integers(0, 120))
def test_globs_of_a_range_fit_it_and_nothing_else(first: int, last: int):
    globs = range_globs(first, last)
    fitting = [number for number in range(200) if any(fnmatch.fnmatchcase(str(number), glob) for glob in globs)]
    assert fitting == list(range(first, last + 1))


def test_a_choice_becomes_a_policy():
    names = [f"base.visual.blocks.{place}" for place in range(4)] + [f"base.text.layers.{place}" for place in range(20)]
    choice = dict.fromkeys(names, "recompute")
    choice |= dict.fromkeys(names[:4], "none") | dict.fromkeys(names[4:9], "offload")
    policy = as_policy(choice, "tile")
    assert policy.tile == ("attention", "mlp", "loss")
    for name in names:
        chosen = policy.for_region(name)
        assert (
            str(chosen).replace("tile(mlp)", "tile").replace("tile", choice[name] if choice[name] == "none" else "tile")
        )
        assert chosen.recompute == (choice[name] == "recompute")
        assert (chosen.offload is not None) == (choice[name] == "offload")
        assert "mlp" in chosen.tile
