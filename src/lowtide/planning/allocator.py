"""What a caching allocator would reserve for a recording's device memory.

A model of torch's CUDA allocator with its defaults: sizes in steps of 512 bytes; small requests (up to 1 MiB) are cut
from segments of 2 MiB, others from segments of 20 MiB, or of their own size in steps of 2 MiB from 10 MiB on; the best
fit is split, and neighbours of one segment join again when they are free. Streams are not told apart: the engine
allocates on the compute stream alone. `expandable_segments` join across segments, and reserve little more than is used.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lowtide.planning.blank import Event

MIB = 2**20
_UNIT = 512
_SMALL = MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
_OWN_SEGMENT_FROM = 10 * MIB


@dataclasses.dataclass(order=True, eq=True)
class _Free:
    size: int
    segment: int
    start: int


@dataclasses.dataclass
class _Used:
    size: int
    segment: int
    start: int
    is_small: bool


class OutOfCapacityError(Exception):
    """The replayed step does not fit."""


class CachingAllocator:
    """Replays requests; `peak_reserved` is what the device shows as taken."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._lengths: dict[int, tuple[int, bool]] = {}
        self._free: dict[bool, list[_Free]] = {True: [], False: []}
        self._edges: dict[bool, dict[tuple[int, int], _Free]] = {True: {}, False: {}}
        self._ends: dict[bool, dict[tuple[int, int], _Free]] = {True: {}, False: {}}
        self._used: dict[int, _Used] = {}
        self._segments = 0
        self.reserved = 0
        self.peak_reserved = 0

    def allocate(self, number: int, nbytes: int) -> None:
        size = max(_UNIT, -(-nbytes // _UNIT) * _UNIT)
        is_small = size <= _SMALL
        block = self._best_fit(size, is_small=is_small) or self._new_segment(size, is_small=is_small)
        rest = block.size - size
        if rest >= _UNIT if is_small else rest > _SMALL:
            self._put(_Free(rest, block.segment, block.start + size), is_small=is_small)
            block.size = size
        self._used[number] = _Used(block.size, block.segment, block.start, is_small)

    def free(self, number: int) -> None:
        used = self._used.pop(number)
        start, size = used.start, used.size
        before = self._ends[used.is_small].get((used.segment, start))
        after = self._edges[used.is_small].get((used.segment, start + size))
        for neighbour in filter(None, (before, after)):
            self._drop(neighbour, is_small=used.is_small)
            start, size = min(start, neighbour.start), size + neighbour.size
        self._put(_Free(size, used.segment, start), is_small=used.is_small)

    def _best_fit(self, size: int, *, is_small: bool) -> _Free | None:
        free = self._free[is_small]
        place = bisect.bisect_left(free, _Free(size, -1, -1))
        if place == len(free):
            return None
        block = free[place]
        self._drop(block, is_small=is_small)
        return block

    def _new_segment(self, size: int, *, is_small: bool) -> _Free:
        if is_small:
            length = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT_FROM:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if self._capacity is not None and self.reserved + length > self._capacity:
            self._release_free_segments()
            if self.reserved + length > self._capacity:
                raise OutOfCapacityError
        self._segments += 1
        self._lengths[self._segments] = (length, is_small)
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return _Free(length, self._segments, 0)

    def _release_free_segments(self) -> None:
        """As torch does before it gives up: segments that nothing uses go back to the device."""
        for segment, (length, is_small) in list(self._lengths.items()):
            block = self._edges[is_small].get((segment, 0))
            if block is not None and block.size == length:
                self._drop(block, is_small=is_small)
                del self._lengths[segment]
                self.reserved -= length

    def _put(self, block: _Free, *, is_small: bool) -> None:
        bisect.insort(self._free[is_small], block)
        self._edges[is_small][block.segment, block.start] = block
        self._ends[is_small][block.segment, block.start + block.size] = block

    def _drop(self, block: _Free, *, is_small: bool) -> None:
        free = self._free[is_small]
        del free[bisect.bisect_left(free, block)]
        del self._edges[is_small][block.segment, block.start]
        del self._ends[is_small][block.segment, block.start + block.size]


def reserved_bytes(events: Iterable[Event]) -> int:
    """The most that a caching allocator reserves over these events, if nothing holds it back."""
    return _replay(events, CachingAllocator())


def least_capacity(events: Iterable[Event], allocated: int, reserved: int) -> int:
    """The least memory in which the allocator gets through, closely enough."""
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
