"""Computes what a caching allocator would reserve for a recording's device memory.

This is a model of torch's CUDA allocator with its defaults. Sizes are multiples of 512 bytes. Small requests (up to
1 MiB) are cut from segments of 2 MiB, larger ones from segments of 20 MiB, and from 10 MiB on each gets a segment of
its size, rounded up to 2 MiB. The best fit is split, and free neighbours of one segment join again. Streams are not
told apart: the engine allocates on the compute stream alone. `expandable_segments`, which joins across segments and
reserves little more than is used, is not modelled.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from lowtide.errors import OutOfCapacityError
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lowtide.recording import Event

MIB = 2**20

_UNIT = 512
_SMALL = MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
_OWN_SEGMENT_FROM = 10 * MIB

_Block = tuple[int, int, int]
"""A block's size, its segment, and where it begins there: sorted by size, the best fit is found at once."""


class CachingAllocator:
    """An allocator that only counts; `peak_reserved` is what the device shows as taken. It may have a `capacity`."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._pools = {True: _Pool(), False: _Pool()}
        self._used: dict[int, tuple[_Block, bool]] = {}
        self._segments: dict[int, tuple[int, bool]] = {}
        self._made = 0
        self.reserved = 0
        self.peak_reserved = 0

    def allocate(self, number: int, nbytes: int) -> None:
        size = max(_UNIT, -(-nbytes // _UNIT) * _UNIT)
        is_small = size <= _SMALL
        pool = self._pools[is_small]
        length, segment, start = pool.take(size) or self._new_segment(size, is_small=is_small)
        rest = length - size
        if rest >= _UNIT if is_small else rest > _SMALL:
            pool.put((rest, segment, start + size))
            length = size
        self._used[number] = ((length, segment, start), is_small)

    def free(self, number: int) -> None:
        block, is_small = self._used.pop(number)
        self._pools[is_small].put(block)

    def _new_segment(self, size: int, *, is_small: bool) -> _Block:
        if is_small:
            length = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT_FROM:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if self._capacity is not None and self.reserved + length > self._capacity:
            self._release_free_segments()
            if self.reserved + length > self._capacity:
                raise OutOfCapacityError(f"{format_bytes(length)} more do not fit in {format_bytes(self._capacity)}")
        self._made += 1
        self._segments[self._made] = (length, is_small)
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return length, self._made, 0

    def _release_free_segments(self) -> None:
        """Return segments that nothing uses to the device, as torch does before it gives up."""
        for segment, (length, is_small) in list(self._segments.items()):
            if self._pools[is_small].drop((length, segment, 0)):
                del self._segments[segment]
                self.reserved -= length


class _Pool:
    """The free blocks of one kind (small or large), sorted by size and found by both of their ends."""

    def __init__(self) -> None:
        self._sorted: list[_Block] = []
        self._by_start: dict[tuple[int, int], _Block] = {}
        self._by_end: dict[tuple[int, int], _Block] = {}

    def take(self, size: int) -> _Block | None:
        """Take out the smallest block that is large enough."""
        place = bisect.bisect_left(self._sorted, (size, 0, 0))
        if place == len(self._sorted):
            return None
        block = self._sorted.pop(place)
        self._forget(block)
        return block

    def put(self, block: _Block) -> None:
        """Put a free block in, joined with its free neighbours."""
        size, segment, start = block
        before = self._by_end.get((segment, start))
        after = self._by_start.get((segment, start + size))
        for neighbour in filter(None, (before, after)):
            self.drop(neighbour)
            size, start = size + neighbour[0], min(start, neighbour[2])
        block = (size, segment, start)
        bisect.insort(self._sorted, block)
        self._by_start[segment, start] = block
        self._by_end[segment, start + size] = block

    def drop(self, block: _Block) -> bool:
        """Take out this block if all of it is free, and return whether it was."""
        _, segment, start = block
        if self._by_start.get((segment, start)) != block:
            return False
        del self._sorted[bisect.bisect_left(self._sorted, block)]
        self._forget(block)
        return True

    def _forget(self, block: _Block) -> None:
        size, segment, start = block
        del self._by_start[segment, start]
        del self._by_end[segment, start + size]


def reserved_bytes(events: Iterable[Event]) -> int:
    """Return the most that a caching allocator reserves over these events if its capacity has no limit."""
    return _replay(events, CachingAllocator())


def least_capacity(events: Iterable[Event], allocated: int, reserved: int) -> int:
    """Return the least capacity that gets the allocator through the events, found by bisection.

    It lies between the bytes that are `allocated` at the peak and those that are `reserved` without a limit, and is
    exact to a large segment or 1/32 of that range.
    """
    low, high = allocated, reserved
    requests = [event for event in events if event.place == "device" and event.change]
    while high - low > max(_LARGE_SEGMENT, (reserved - allocated) // 32):
        middle = (low + high) // 2
        try:
            _replay(requests, CachingAllocator(middle))
        except OutOfCapacityError:
            low = middle
        else:
            high = middle
    return high


def _replay(events: Iterable[Event], allocator: CachingAllocator) -> int:
    sizes: dict[int, int] = {}
    for event in events:
        if event.place != "device" or event.change == 0:
            continue
        before = sizes.get(event.storage, 0)
        sizes[event.storage] = before + event.change
        if before == 0:
            allocator.allocate(event.storage, event.change)
        elif sizes[event.storage] == 0:
            allocator.free(event.storage)
            del sizes[event.storage]
    return allocator.peak_reserved
