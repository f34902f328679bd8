"""Allocates the host memory that copies go through: pinned, cut out of slabs, in whole pages.

Torch's host allocator rounds every block up to a power of two, which can double the memory that offload takes. So
`SlabPool` asks for slabs of power-of-two sizes and divides them itself: a large tensor is spread over several slabs, in
as few pieces as there is room for, and small tensors share one. A slab serves one device, because only copies of one
device's streams are ordered among each other. It goes back to torch (which caches it) when nothing in it is used.

`RangeAllocator` divides anything that has an address space: a slab here, a scratch file in `files`. Whoever holds an
`Extent` owns its bytes; they are free again when it dies.

[Note: interrupted allocations] A KeyboardInterrupt may come between any two steps of an allocation. The next call
notices that one was not finished, and works out from the extents that live what is free. So no byte is ever lost.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import dataclasses
import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 4096
"""Direct I/O wants addresses, lengths and offsets to be multiples of this."""

ALIGNMENT = PAGE
"""Pieces of slabs are whole pages: buffers that share no page can be told apart by page protection."""

SLAB_BYTES = (4 * 1024**2, 256 * 1024**2)
"""The smallest and the largest slab. Each new one is about as large as all before it, so a small model pins little."""


def round_up(size: int) -> int:
    """Round a size up to whole pages."""
    return -(-size // PAGE) * PAGE


def round_down(size: int) -> int:
    """Round a size down to whole pages."""
    return size // PAGE * PAGE


# --- Memory -------------------------------------------------------------------------------------------------------


class HostMemory:
    """Allocates pinned memory for one store.

    When the system has none left (a driver's or a container's limit), it returns pageable memory: everything stays
    right, but copies no longer overlap with compute. A warning says so once, and `pageable_bytes` counts how much it
    was.
    """

    def __init__(self) -> None:
        self.pageable_bytes = 0

    def __call__(self, size: int) -> torch.Tensor:
        try:
            return pinned(size)
        except RuntimeError as error:
            if not self.pageable_bytes:
                reason = str(error).splitlines()[0]
                warnings.warn(
                    f"lowtide: no pinned memory left for {size} bytes ({reason}). The store continues with pageable "
                    "memory, whose copies do not overlap with compute. To avoid that, lower the host limit, or raise "
                    "the limit of locked memory (ulimit -l)",
                    stacklevel=2,
                )
            self.pageable_bytes += size
            return page_aligned(size)


def pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def page_aligned(size: int) -> torch.Tensor:
    """Allocate pageable memory that starts at a page. None of it is touched."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as a Python buffer, for system calls. The tensor must outlive it.

    Torch's tensors do not have Python's buffer interface, and NumPy is not needed for it.
    """
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


# --- Ranges -------------------------------------------------------------------------------------------------------


class FreeRanges:
    """Half-open ranges `(start, end)` that are free: sorted, never touching."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.ranges = [(start, end) for start, end in ranges if end > start]

    def allocate(self, length: int) -> int | None:
        """Take `length` bytes out of the first range that is long enough, and return their start."""
        for position, (start, end) in enumerate(self.ranges):
            if end - start >= length:
                self.ranges[position : position + 1] = [(start + length, end)] if end - start > length else []
                return start
        return None

    def free(self, start: int, end: int) -> None:
        """Add a range, and join it with its neighbours."""
        position = bisect.bisect_left(self.ranges, (start, end))
        first = last = position
        if position > 0 and self.ranges[position - 1][1] == start:
            first, start = position - 1, self.ranges[position - 1][0]
        if position < len(self.ranges) and self.ranges[position][0] == end:
            last, end = position + 1, self.ranges[position][1]
        self.ranges[first:last] = [(start, end)]


class Extent:
    """A range that is in use. It is free again when this object dies."""

    __slots__ = ("__weakref__", "end", "freed", "start")

    def __init__(self, start: int, end: int, freed: collections.deque[tuple[int, int]]) -> None:
        self.start, self.end, self.freed = start, end, freed

    def __del__(self) -> None:
        """Queue the range for its allocator's next call: a destructor must not wait for a lock."""
        if hasattr(self, "freed"):  # else its construction was interrupted
            self.freed.append((self.start, self.end))


class RangeAllocator:
    """Divides `size` bytes into extents.

    Not thread-safe: its owner holds a lock. Extents may die at any time, on any thread.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._free = FreeRanges((0, size))
        self._freed: collections.deque[tuple[int, int]] = collections.deque()
        self._living: weakref.WeakSet[Extent] = weakref.WeakSet()
        self._used = 0
        self._is_changing = False

    @property
    def used(self) -> int:
        """Return the bytes in extents that live."""
        self._begin()
        self._is_changing = False
        return self._used

    @property
    def longest_free(self) -> int:
        """Return the bytes of the longest free range."""
        self._begin()
        self._is_changing = False
        return max((end - start for start, end in self._free.ranges), default=0)

    def allocate(self, length: int) -> Extent | None:
        """Return an extent, or None if no free range is long enough."""
        self._begin()
        start = self._free.allocate(length)
        extent = None
        if start is not None:
            extent = Extent(start, start + length, self._freed)
            self._living.add(extent)
            self._used += length
        self._is_changing = False
        return extent

    def grow(self, length: int, limit: int) -> bool:
        """Make room at the end for an extent of this length. Return False if that would exceed `limit` bytes."""
        self._begin()
        last = self._free.ranges[-1:]
        free = last[0][1] - last[0][0] if last and last[0][1] == self.size else 0
        size = self.size + max(0, length - free)
        if size <= limit and size > self.size:
            self._free.free(self.size, size)
            self.size = size
        self._is_changing = False
        return size <= limit

    def _begin(self) -> None:
        """Begin a change: take in what was freed, and repair what an interrupted change left."""
        if self._is_changing:  # see [Note: interrupted allocations]
            self._rebuild()
        self._is_changing = True
        while self._freed:
            start, end = self._freed.popleft()
            self._free.free(start, end)
            self._used -= end - start

    def _rebuild(self) -> None:
        # An extent whose allocation was interrupted may still be held by a traceback. By the time it dies, its bytes
        # may belong to another extent, so it must not free them: it reports to the old queue, which nobody reads.
        self._freed = collections.deque()
        extents = list(self._living)
        for extent in extents:
            extent.freed = self._freed
        living = sorted((extent.start, extent.end) for extent in extents)
        self._used = sum(end - start for start, end in living)
        ends = [0, *(end for _, end in living)]
        starts = [*(start for start, _ in living), self.size]
        self._free = FreeRanges(*zip(ends, starts, strict=True))


# --- Slabs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    device: torch.device
    ranges: RangeAllocator


@dataclasses.dataclass(eq=False)
class Piece:
    """A part of a slab; free again when nobody holds it."""

    slab: _Slab
    extent: Extent

    @property
    def start(self) -> int:
        return self.extent.start

    @property
    def end(self) -> int:
        return self.extent.end

    def bytes(self, count: int) -> torch.Tensor:
        """Return its first `count` bytes."""
        return self.slab.memory[self.start : self.start + count]


class SlabPool:
    """Hands out pieces of pinned memory up to a limit in bytes; None means no limit.

    Not thread-safe: its owner holds a lock. Pieces may die at any time, also in a destructor.
    """

    def __init__(
        self,
        limit: int | None = None,
        slab_bytes: tuple[int, int] = SLAB_BYTES,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        if limit is not None and limit < 0:
            raise InvalidValueError(f"the limit of a host store must not be negative, got {limit}")
        self._limit = limit
        self._smallest, self._largest = slab_bytes
        self._new_memory = allocate or HostMemory()
        self._slabs: list[weakref.ref[_Slab]] = []
        self.peak = 0

    @property
    def used(self) -> int:
        """Return the bytes in pieces that are in use."""
        return sum(slab.ranges.used for slab in self._living())

    @property
    def reserved(self) -> int:
        """Return the bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._living())

    def allocate(self, size: int, device: torch.device) -> list[Piece] | None:
        """Return pieces that together hold `size` bytes of a device, or None if the limit does not allow it."""
        pieces: list[Piece] = []
        while size > 0:
            part = min(round_up(size), self._longest_piece(device))
            try:
                piece = self._allocate_piece(part, device) if part else None
            except RuntimeError:  # no memory left: free what was allocated now, not when the traceback dies
                pieces.clear()
                raise
            if piece is None:
                return None
            pieces.append(piece)
            size -= part
        self.peak = max(self.peak, self.used)
        return pieces

    def _living(self) -> list[_Slab]:
        """Return the slabs that are used: their pieces hold them, and the pool does not."""
        slabs = [slab for slab in (reference() for reference in self._slabs) if slab is not None]
        self._slabs = [weakref.ref(slab) for slab in slabs]
        return slabs

    def _longest_piece(self, device: torch.device) -> int:
        """Return the most bytes that one piece can have: a new slab's, or the longest free range's."""
        free = (slab.ranges.longest_free for slab in self._living() if slab.device == device)
        return max([self._next_slab_bytes(), *free])

    def _next_slab_bytes(self) -> int:
        """Return the size of the next slab; 0 if the limit allows none."""
        reserved = self.reserved
        size = _slab_after(reserved, self._smallest, self._largest)
        if self._limit is None:
            return size
        return max(0, min(size, round_down(self._limit - reserved)))

    def _allocate_piece(self, size: int, device: torch.device) -> Piece | None:
        """Return a piece no longer than the longest possible, out of a new slab if no free range is long enough."""
        for slab in self._living():
            extent = slab.ranges.allocate(size) if slab.device == device else None
            if extent is not None:
                return Piece(slab, extent)
        length = self._next_slab_bytes()
        slab = _Slab(self._new_memory(length), device, RangeAllocator(length))
        self._slabs.append(weakref.ref(slab))
        extent = slab.ranges.allocate(size)
        return None if extent is None else Piece(slab, extent)  # a new slab always has room


def pinned_for(used: int) -> int:
    """Return the bytes of the slabs that hold `used` bytes, if they are filled to the end."""
    reserved = 0
    while reserved < used:
        reserved += _slab_after(reserved, *SLAB_BYTES)
    return reserved


def _slab_after(reserved: int, smallest: int, largest: int) -> int:
    size = smallest
    while size < min(reserved, largest):
        size *= 2
    return size
