"""Computes what a caching allocator would reserve for a recording's device memory.

This is a model of torch's CUDA allocator with its defaults. Sizes are multiples of 512 bytes. Small requests (up to
1 MiB) are cut from segments of 2 MiB, larger ones from segments of 20 MiB, and from 10 MiB on each gets a segment of
its size, rounded up to 2 MiB. The best fit is split, and free neighbours of one segment join again. Each stream has
pools of its own: what FSDP2 gathers and reduces lies in memory that activations never get. With
`expandable_segments`, a pool is one segment that grows in steps of 20 MiB (small requests: 2 MiB), so that neighbours
always join and a free block at its end is lengthened.

What was freed before the step began leaves nothing behind: the states of optimizers are made by a step that a real run
takes once, whose cached segments the first forward then uses.
"""

from __future__ import annotations

import bisect
import collections
from typing import TYPE_CHECKING

from lowtide.errors import OutOfCapacityError
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lowtide.recording import Event, Recorded

MIB = 2**20

_UNIT = 512
_SMALL = MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
_OWN_SEGMENT_FROM = 10 * MIB

_PoolKey = tuple[str, bool]
"""The stream that a pool belongs to, and whether it is the one for small requests."""

_Block = tuple[int, int, int]
"""A block's size, its segment, and where it begins there: sorted by size, the best fit is found at once."""


class CachingAllocator:
    """An allocator that only counts; `peak_reserved` is what the device shows as taken. It may have a `capacity`."""

    def __init__(self, capacity: int | None = None, *, expandable: bool = False) -> None:
        self._capacity = capacity
        self._expandable = expandable
        self._growing: dict[_PoolKey, tuple[int, int]] = {}
        """The number and the length of each pool's one segment, if segments grow."""
        self._pools: dict[_PoolKey, _Pool] = collections.defaultdict(_Pool)
        self._used: dict[int, tuple[_Block, _PoolKey]] = {}
        self._segments: dict[int, tuple[int, _PoolKey]] = {}
        self._made = 0
        self.reserved = 0
        self.peak_reserved = 0

    def allocate(self, number: int, nbytes: int, stream: str = "") -> None:
        size = max(_UNIT, -(-nbytes // _UNIT) * _UNIT)
        is_small = size <= _SMALL
        key = (stream, is_small)
        pool = self._pools[key]
        make = self._lengthened if self._expandable else self._new_segment
        length, segment, start = pool.take(size) or make(size, key)
        rest = length - size
        if rest >= _UNIT if is_small or self._expandable else rest > _SMALL:
            pool.put((rest, segment, start + size))
            length = size
        self._used[number] = ((length, segment, start), key)

    def free(self, number: int) -> None:
        block, key = self._used.pop(number)
        self._pools[key].put(block)

    def _new_segment(self, size: int, key: _PoolKey) -> _Block:
        _, is_small = key
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
        self._segments[self._made] = (length, key)
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return length, self._made, 0

    def _lengthened(self, size: int, key: _PoolKey) -> _Block:
        """Lengthen a pool's one segment, and with it the free block at its end if there is one."""
        _, is_small = key
        segment, end = self._growing.get(key, (-len(self._growing), 0))
        free = self._pools[key].take_last(segment, end)
        missing = size - (free[0] if free else 0)
        step = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        more = -(-missing // step) * step
        self._growing[key] = (segment, end + more)
        self.reserved += more
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        start = free[2] if free else end
        return end + more - start, segment, start

    def _release_free_segments(self) -> None:
        """Return segments that nothing uses to the device, as torch does before it gives up."""
        for segment, (length, key) in list(self._segments.items()):
            if self._pools[key].drop((length, segment, 0)):
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

    def take_last(self, segment: int, end: int) -> _Block | None:
        """Take out the free block that ends where its segment does."""
        block = self._by_end.get((segment, end))
        if block is not None:
            self.drop(block)
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


def requests_of(recording: Recorded) -> list[Event]:
    """Return what the device's allocator is asked for: the step's own requests, after what was there when it began."""
    requests: list[Event] = []
    there: dict[int, list[Event]] = {}
    sizes: collections.Counter[int] = collections.Counter()
    for event in recording.events[: recording.start]:
        if event.place == "device" and event.change:
            there.setdefault(event.storage, []).append(event)
            sizes[event.storage] += event.change
            if sizes[event.storage] == 0:
                del there[event.storage]
    for storage, events in there.items():
        requests.append(events[0]._replace(change=sizes[storage]))
    requests += (event for event in recording.events[recording.start :] if event.place == "device" and event.change)
    return requests


def reserved_bytes(requests: Iterable[Event], *, expandable: bool = False) -> int:
    """Return the most that a caching allocator reserves over these requests if its capacity has no limit."""
    return _replay(requests, CachingAllocator(expandable=expandable))


def least_expandable_capacity(requests: Sequence[Event], allocated: int, reserved: int) -> int:
    """Return the least capacity with expandable segments, whose free pages move to where they are needed.

    What is left is the rounding of each pool to its last page.
    """
    pools = {(event.stream, event.change <= _SMALL) for event in requests if event.change > 0}
    return min(reserved, allocated + len(pools) * _LARGE_SEGMENT)


def least_capacity(requests: Sequence[Event], allocated: int, reserved: int) -> int:
    """Return the least capacity that gets the allocator through the events, found by bisection.

    It lies between the bytes that are `allocated` at the peak and those that are `reserved` without a limit, and is
    exact to a large segment or 1/32 of that range.
    """
    low, high = allocated, reserved
    while high - low > max(_LARGE_SEGMENT, (reserved - allocated) // 32):
        middle = (low + high) // 2
        try:
            _replay(requests, CachingAllocator(middle))
        except OutOfCapacityError:
            low = middle
        else:
            high = middle
    return high


def _replay(requests: Iterable[Event], allocator: CachingAllocator) -> int:
    sizes: dict[int, int] = {}
    for event in requests:
        before = sizes.get(event.storage, 0)
        sizes[event.storage] = before + event.change
        if before == 0:
            allocator.allocate(event.storage, event.change, event.stream)
        elif sizes[event.storage] == 0:
            allocator.free(event.storage)
            del sizes[event.storage]
    return allocator.peak_reserved
