"""The slab pool: pieces never overlap, the limit holds, empty slabs go."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.stores.host_memory import ALIGNMENT, SLAB_BYTES, SlabPool, pinned_for

SLAB = 8 * ALIGNMENT
CPU = torch.device("cpu")


def pool(limit: int | None = None) -> SlabPool:
    return SlabPool(limit, slab_bytes=(SLAB, SLAB), allocate=lambda size: torch.empty(size, dtype=torch.uint8))


def test_small_pieces_share_a_slab():
    slabs = pool()
    assert (slabs.used, slabs.reserved, slabs.peak) == (0, 0, 0)
    taken = [slabs.allocate(100, CPU) for _ in range(8)]
    assert slabs.reserved == SLAB
    assert slabs.used == 8 * ALIGNMENT
    assert all(len(pieces) == 1 for pieces in taken)


def test_a_large_request_is_spread_over_slabs_without_rounding_it_up():
    slabs = pool()
    pieces = slabs.allocate(5 * SLAB + 1, CPU)
    assert slabs.used == 5 * SLAB + ALIGNMENT
    assert slabs.reserved == 6 * SLAB
    assert sum(piece.end - piece.start for piece in pieces) >= 5 * SLAB + 1


def test_slabs_grow_with_what_is_held():
    slabs = SlabPool(slab_bytes=(SLAB, 8 * SLAB), allocate=lambda size: torch.empty(size, dtype=torch.uint8))
    held = [slabs.allocate(SLAB, CPU) for _ in range(20)]
    assert len(held) == 20
    assert slabs.used == 20 * SLAB
    assert slabs.reserved <= 2 * slabs.used


def test_returned_pieces_are_used_again_and_empty_slabs_go():
    slabs = pool()
    first, second = slabs.allocate(SLAB, CPU), slabs.allocate(ALIGNMENT, CPU)
    first.clear()
    assert slabs.reserved == SLAB
    second.clear()
    assert (slabs.used, slabs.reserved) == (0, 0)
    assert slabs.peak == SLAB + ALIGNMENT


def test_the_limit_counts_whole_slabs_and_a_refusal_changes_nothing():
    slabs = pool(limit=2 * SLAB)
    assert slabs.allocate(3 * SLAB, CPU) is None
    assert (slabs.used, slabs.reserved) == (0, 0)
    held = slabs.allocate(2 * SLAB, CPU)
    assert held is not None
    assert slabs.allocate(1, CPU) is None


@pytest.mark.parametrize("size", [SLAB - ALIGNMENT, 3 * SLAB // 2, 5 * SLAB - 1])
def test_at_the_limit_a_request_takes_few_pieces_and_all_that_is_free(size):
    """Once, what was left in slabs was taken page by page: a copy for each."""
    slabs = SlabPool(20 * SLAB, (SLAB, 8 * SLAB), allocate=lambda length: torch.empty(length, dtype=torch.uint8))
    held = []
    while (pieces := slabs.allocate(size, CPU)) is not None:
        held.append(pieces)
    assert max(len(pieces) for pieces in held) <= 6
    assert slabs.reserved == 20 * SLAB
    assert len(held) == 20 * SLAB // (-(-size // ALIGNMENT) * ALIGNMENT)


@pytest.mark.parametrize("limit", [0, 1])
def test_a_limit_below_a_page_takes_nothing(limit):
    assert pool(limit).allocate(1, CPU) is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 3 * SLAB), st.integers(-5, -1)), max_size=40))
def test_pieces_never_overlap(requests):
    """A positive number takes as many bytes, a negative one gives an older request back."""
    slabs, out = pool(), []
    for request in requests:
        if request > 0:
            out.append(slabs.allocate(request, CPU))
        elif len(out) >= -request:
            out.pop(request)
        spans = sorted((id(p.slab), p.start, p.end) for pieces in out for p in pieces)
        for (slab, _, end), (next_slab, start, _) in itertools.pairwise(spans):
            assert slab != next_slab or end <= start
        assert slabs.used == sum(p.end - p.start for pieces in out for p in pieces)


def test_a_failed_allocation_gives_back_what_was_taken():
    count = iter(range(3))

    def allocate(size):
        if next(count) == 2:
            raise RuntimeError("no pinned memory")
        return torch.empty(size, dtype=torch.uint8)

    slabs = SlabPool(slab_bytes=(SLAB, SLAB), allocate=allocate)
    with pytest.raises(RuntimeError, match="no pinned memory"):
        slabs.allocate(3 * SLAB, CPU)
    assert (slabs.used, slabs.reserved) == (0, 0)


def test_a_slab_serves_one_device():
    slabs = pool()
    (first,) = slabs.allocate(100, torch.device("sim", 0))
    (second,) = slabs.allocate(100, torch.device("sim", 1))
    (third,) = slabs.allocate(100, torch.device("sim", 0))
    assert first.slab is third.slab
    assert second.slab is not first.slab


@pytest.mark.parametrize(
    ("slabs", "reserved"), [(0, 0), (0.5, 1), (1, 1), (1.5, 2), (2, 2), (2.5, 4), (4, 4), (4.5, 8)]
)
def test_what_is_pinned_for_so_many_bytes(slabs, reserved):
    """Slabs grow as the pool does: each is as large as all before it, up to the largest."""
    smallest, largest = SLAB_BYTES
    assert largest >= 4 * smallest
    assert pinned_for(int(slabs * smallest)) == reserved * smallest
