"""Free ranges of something that is cut into pieces: a slab of memory, a file."""

from __future__ import annotations

import bisect


class FreeRanges:
    """Half-open ranges `(start, end)` that nobody uses: sorted, never touching."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.ranges = [(start, end) for start, end in ranges if end > start]

    def cut(self, size: int) -> int | None:
        """The start of `size` bytes that are free no longer, first fit."""
        for position, (start, end) in enumerate(self.ranges):
            if end - start >= size:
                self.ranges[position : position + 1] = [(start + size, end)] if end - start > size else []
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
