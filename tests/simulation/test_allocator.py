"""The simulated caching allocator: segments, what is used again, what is given back, and no byte twice."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.recording import Event, Moment, Owner
from lowtide.simulation.allocator import CachingAllocator, OutOfCapacityError, requests_of, reserved_bytes

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


def test_a_stream_gets_nothing_of_another_stream_s_pool():
    allocator = CachingAllocator()
    allocator.allocate(1, 60 * MIB, "all_gather")
    allocator.free(1)
    allocator.allocate(2, 60 * MIB)
    assert allocator.reserved == 120 * MIB
    allocator.allocate(3, 60 * MIB, "all_gather")
    assert allocator.reserved == 120 * MIB


def test_a_segment_that_grows_joins_what_segments_keep_apart():
    fixed, growing = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (fixed, growing):
        allocator.allocate(1, 60 * MIB)
        allocator.allocate(2, 60 * MIB)
        allocator.free(1)
        allocator.free(2)
        allocator.allocate(3, 100 * MIB)
        allocator.free(3)
        allocator.allocate(4, 130 * MIB)
    assert fixed.reserved == (60 + 60 + 100 + 130) * MIB
    assert growing.reserved == 140 * MIB, "the free end was lengthened, in steps of 20 MiB"


def test_what_was_freed_before_the_step_leaves_no_segment():
    def event(change: int, storage: int) -> Event:
        return Event(change, storage, "device", Owner("optimizer", ""), Moment("forward", ""), 0.0)

    @dataclasses.dataclass
    class Recording:
        events: list[Event]
        start: int

    before = [event(50 * MIB, 1), event(30 * MIB, 2), event(-50 * MIB, 1)]
    recording = Recording([*before, event(20 * MIB, 3)], start=3)
    assert reserved_bytes(requests_of(recording)) == 50 * MIB


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=60), st.booleans())
def test_the_allocator_never_hands_out_the_same_bytes_twice(requests: list[tuple[int, bool]], expandable: bool):
    allocator = CachingAllocator(expandable=expandable)
    for number, (size, frees) in enumerate(requests):
        allocator.allocate(number, size)
        if frees:
            allocator.free(number)
    taken = sorted((segment, start, start + size) for (size, segment, start), _ in allocator._used.values())
    for (segment, _, end), (other, start, _) in itertools.pairwise(taken):
        assert segment != other or end <= start
    used = sum(end - start for _, start, end in taken)
    assert used <= allocator.reserved <= allocator.peak_reserved
