"""What attention in tiles costs in a plan: the queries of a tile see all keys up to their own, and no more."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowtide.simulation.costs import cost_of

aten = torch.ops.aten
LENGTH, HEADS, WIDTH = 1000, 4, 16


def flops(rows: int, keys: int, *, backward: bool, is_causal: bool = True) -> float:
    """Return the FLOPs of the attention of some rows to some keys, the last of which belong to each other."""
    query, key, value = (torch.empty(1, HEADS, count, WIDTH, device="meta") for count in (rows, keys, keys))
    if not backward:
        args = (query, key, value, 0.0, is_causal)
        tensors = [query, key, value]
        return cost_of(aten._scaled_dot_product_flash_attention.default, args, {}, (query,), tensors).flops
    sums = torch.empty(1, HEADS, rows, device="meta")
    args = (query, query, key, value, query, sums, None, None, rows, keys, 0.0, is_causal, sums, sums)
    made = (query, key, value)
    return cost_of(aten._scaled_dot_product_flash_attention_backward.default, args, {}, made, [query, key]).flops


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tiles", [1, 2, 7, 10])
def test_causal_tiles_cost_together_what_the_whole_costs(tiles, backward):
    ends = [LENGTH * (index + 1) // tiles for index in range(tiles)]
    together = sum(flops(end - start, end, backward=backward) for start, end in itertools.pairwise([0, *ends]))
    assert together == pytest.approx(flops(LENGTH, LENGTH, backward=backward))
    assert together == pytest.approx(flops(LENGTH, LENGTH, backward=backward, is_causal=False) / 2)


def test_the_last_tile_costs_most():
    first, last = flops(100, 100, backward=False), flops(100, 1000, backward=False)
    assert last == pytest.approx(19 * first)
