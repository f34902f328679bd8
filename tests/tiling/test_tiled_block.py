"""Blocks in tiles, attention included: the gradients of the whole, in double precision, for many kinds of attention."""

from __future__ import annotations

import pytest

import lowtide
from models import attentive
from models.attentive import everything_in_double  # noqa: F401  (a fixture)
from models.tiny import IS_4
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

pytestmark = [
    ignore_warnings_of("peft", "torch", "transformers"),
    ignore_dropped_caches,
    pytest.mark.skipif(IS_4, reason="transformers 4 hands out no eager attention, and some of these models are newer"),
]

TOLERANCE = 1e-12


def tiled_blocks(applied):
    blocks = {region.name for region in applied.regions}
    return [tiles for tiles in applied.report().tiles if tiles.name in blocks]


def cases():
    for name in [*attentive.CONFIGS, "qwen3_vl"]:
        for attention in ("sdpa", "eager"):
            if attention == "sdpa" and name in attentive.WITHOUT_SDPA:
                continue
            for padded in (False, True):
                yield name, attention, padded


@pytest.mark.parametrize(("name", "attention", "padded"), [*cases()])
def test_gradients_of_the_whole(name, attention, padded, everything_in_double):  # noqa: F811
    model, batch = attentive.make(name, attention), attentive.batch(name, padded=padded)
    expected = attentive.step(model, batch)
    for policy in ("tile(attention, mlp, tokens=12)", "recompute+tile(attention, mlp, tokens=12)"):
        with lowtide.apply(model, policy) as applied:
            for _ in range(2):
                assert attentive.error(attentive.step(model, batch), expected) <= TOLERANCE, policy
            text = [tiles for tiles in tiled_blocks(applied) if "visual" not in tiles.name]
            assert all(tiles.tiles >= 3 * tiles.calls > 0 for tiles in text), text
            assert all(tiles.recomputed_tiles == tiles.tiles for tiles in text), text
    assert attentive.error(attentive.step(model, batch), expected) == 0
