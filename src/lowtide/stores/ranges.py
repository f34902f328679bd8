"""Something that is cut into ranges: a slab of memory, a file.

Who holds a `Cut` owns its bytes, and they are free again when it dies.

[Note: interrupted cuts] A KeyboardInterrupt may come between any two steps of a cut. One that was not finished is
noticed by the next call, which then works out anew, from the cuts that live, what is free. So nothing is ever lost.
"""

from __future__ import annotations

import bisect
import collections
import weakref


class FreeRanges:
    """Half-open ranges `(start, end)` that nobody uses: sorted, never touching."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.ranges = [(start, end) for start, end in ranges if end > start]

    def cut(self, length: int) -> int | None:
        """The start of `length` bytes that are free no longer, first fit."""
        for position, (start, end) in enumerate(self.ranges):
            if end - start >= length:
                self.ranges[position : position + 1] = [(start + length, end)] if end - start > length else []
                return start
        return None

    def give_back(self, start: int, end: int) -> None:
        """These bytes are free again; neighbours become one range."""
        position = bisect.bisect_left(self.ranges, (start, end))
        first = last = position
        if position > 0 and self.ranges[position - 1][1] == start:
            first, start = position - 1, self.ranges[position - 1][0]
        if position < len(self.ranges) and self.ranges[position][0] == end:
            last, end = position + 1, self.ranges[position][1]
        self.ranges[first:last] = [(start, end)]


class Cut:
    """A range that is somebody's; free again when nobody holds this."""

    __slots__ = ("__weakref__", "end", "returned", "start")

    def __init__(self, start: int, end: int, returned: collections.deque[tuple[int, int]]) -> None:
        self.start, self.end, self.returned = start, end, returned

    def __del__(self) -> None:
        """Waits for no lock: it is put in order at the next call."""
        if hasattr(self, "returned"):  # else its making was interrupted
            self.returned.append((self.start, self.end))


class Ground:
    """`size` bytes that are cut. Not thread-safe: its owner locks. Only cuts may die anywhere."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._free = FreeRanges((0, size))
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._living: weakref.WeakSet[Cut] = weakref.WeakSet()
        self._used = 0
        self._is_changing = False

    @property
    def used(self) -> int:
        """Bytes in cuts that live."""
        self._begin()
        self._is_changing = False
        return self._used

    @property
    def longest(self) -> int:
        """Bytes of the longest range that is free."""
        self._begin()
        self._is_changing = False
        return max((end - start for start, end in self._free.ranges), default=0)

    def cut(self, length: int) -> Cut | None:
        """A piece, or nothing if no free range is long enough."""
        self._begin()
        start = self._free.cut(length)
        cut = None
        if start is not None:
            cut = Cut(start, start + length, self._returned)
            self._living.add(cut)
            self._used += length
        self._is_changing = False
        return cut

    def grow(self, length: int, limit: int) -> bool:
        """Make room for a cut of this length at the end, if `limit` allows that size."""
        self._begin()
        at_the_end = self._free.ranges[-1:]
        free = at_the_end[0][1] - at_the_end[0][0] if at_the_end and at_the_end[0][1] == self.size else 0
        size = self.size + max(0, length - free)
        if size <= limit and size > self.size:
            self._free.give_back(self.size, size)
            self.size = size
        self._is_changing = False
        return size <= limit

    def _begin(self) -> None:
        if self._is_changing:  # see [Note: interrupted cuts]
            self._work_out_anew()
        self._is_changing = True
        while self._returned:
            start, end = self._returned.popleft()
            self._free.give_back(start, end)
            self._used -= end - start

    def _work_out_anew(self) -> None:
        # A cut that was interrupted before it was known may still be held by a traceback. It must not give back what is
        # somebody else's by then: it returns to the old queue, which nobody reads.
        self._returned = collections.deque()
        cuts = list(self._living)
        for cut in cuts:
            cut.returned = self._returned
        living = sorted((cut.start, cut.end) for cut in cuts)
        self._used = sum(end - start for start, end in living)
        ends = [0, *(end for _, end in living)]
        starts = [*(start for start, _ in living), self.size]
        self._free = FreeRanges(*zip(ends, starts, strict=True))
