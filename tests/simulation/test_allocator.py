"""The simulated caching allocator: segments, what is used again, what is given back, and no byte twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.simulation.allocator import CachingAllocator, OutOfCapacityError

MIB = 2**20


def test_the_allocator_reserves_segments_and_uses_them_again():
    allocator = CachingAllocator()
    allocator.allocate(1, 512)
    assert allocator.reserved == 2 * MIB, "small ones share a segment"
    allocator.allocate(2, 5 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(3, 12 * MIB)
    assert allocator.reserved == 22 * MIB, "the rest of the second segment"
    allocator.free(2)
    allocator.free(3)
    allocator.allocate(4, 19 * MIB)
    assert allocator.reserved == 22 * MIB, "neighbours joined"
    allocator.allocate(5, 30 * MIB)
    assert allocator.peak_reserved == 52 * MIB


def test_the_allocator_gives_back_what_nothing_uses_before_it_gives_up():
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.allocate(1, 60 * MIB)
    allocator.free(1)
    allocator.allocate(2, 80 * MIB)
    assert allocator.reserved == 80 * MIB
    with pytest.raises(OutOfCapacityError):
        allocator.allocate(3, 30 * MIB)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=60))
def test_the_allocator_never_hands_out_the_same_bytes_twice(requests: list[tuple[int, bool]]):
    allocator = CachingAllocator()
    for number, (size, frees) in enumerate(requests):
        allocator.allocate(number, size)
        if frees:
            allocator.free(number)
    taken = sorted((segment, start, start + size) for (size, segment, start), _ in allocator._used.values())
    for (segment, _, end), (other, start, _) in itertools.pairwise(taken):
        assert segment != other or end <= start
    used = sum(end - start for _, start, end in taken)
    assert used <= allocator.reserved <= allocator.peak_reserved
