"""Host memory for copies: pinned if there is any left, else pageable, which is said and counted.

A tensor's bytes as Python's buffer, for system calls. Torch itself has none, and NumPy is not needed for it.

Something that is cut into ranges: a slab of memory, a file.

Who holds a `Extent` owns its bytes, and they are free again when it dies.

[Note: interrupted cuts] A KeyboardInterrupt may come between any two steps of a cut. One that was not finished is
noticed by the next call, which then works out anew, from the cuts that live, what is free. So nothing is ever lost.

A bounded pool of pinned memory, cut out of slabs.

A slab serves one device: copies to and from it are in the order of that device's streams, and of no other's.

Torch's host allocator rounds every block to a power of two, which can double the memory that offload takes. So the
pool asks for slabs of power-of-two sizes and cuts them itself: a large tensor is spread over several slabs, in as few
pieces as there is room for, and small ones share one. A slab goes back to torch (which caches it) when nothing in it
is used.
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
"""What direct I/O wants addresses, lengths and offsets to be multiples of."""


def round_up(size: int) -> int:
    """To whole pages."""
    return -(-size // PAGE) * PAGE


def round_down(size: int) -> int:
    """To whole pages."""
    return size // PAGE * PAGE


def pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def page_aligned(size: int) -> torch.Tensor:
    """Pageable memory that starts at a page. None of it is touched."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


class HostMemory:
    """Allocates pinned memory for one store.

    When the system has none left (a driver's or a container's limit), memory is pageable: everything stays right, and
    copies to it no longer overlap with compute. A warning says so once, and `pageable_bytes` tells how much it was.
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
                    f"lowtide: no pinned memory left for {size} bytes ({reason}): the store goes on with pageable "
                    "memory, whose copies do not overlap with compute. Lower the host limit, or raise the limit of "
                    "locked memory (ulimit -l)",
                    stacklevel=2,
                )
            self.pageable_bytes += size
            return page_aligned(size)


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host. The tensor must outlive it."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


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


class Extent:
    """A range that is somebody's; free again when nobody holds this."""

    __slots__ = ("__weakref__", "end", "returned", "start")

    def __init__(self, start: int, end: int, returned: collections.deque[tuple[int, int]]) -> None:
        self.start, self.end, self.returned = start, end, returned

    def __del__(self) -> None:
        """Waits for no lock: it is put in order at the next call."""
        if hasattr(self, "returned"):  # else its making was interrupted
            self.returned.append((self.start, self.end))


class RangeAllocator:
    """`size` bytes that are cut. Not thread-safe: its owner locks. Only cuts may die anywhere."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._free = FreeRanges((0, size))
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._living: weakref.WeakSet[Extent] = weakref.WeakSet()
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

    def cut(self, length: int) -> Extent | None:
        """A piece, or nothing if no free range is long enough."""
        self._begin()
        start = self._free.cut(length)
        cut = None
        if start is not None:
            cut = Extent(start, start + length, self._returned)
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


ALIGNMENT = PAGE  # a page: buffers that share none can be told apart by page protection

SLAB_BYTES = (4 * 1024**2, 256 * 1024**2)
"""The smallest and the largest slab. Each new one is about as large as all before it, so a small model pins little."""


@dataclasses.dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    device: torch.device
    ground: RangeAllocator


@dataclasses.dataclass(eq=False)
class Piece:
    """A cut of a slab; free again when nobody holds it."""

    slab: _Slab
    cut: Extent

    @property
    def start(self) -> int:
        return self.cut.start

    @property
    def end(self) -> int:
        return self.cut.end

    def bytes(self, count: int) -> torch.Tensor:
        """Its first `count` bytes."""
        return self.slab.memory[self.start : self.start + count]


class SlabPool:
    """Hands out pieces of pinned memory up to a limit in bytes; None means no limit.

    Not thread-safe: its owner locks. Only pieces may die anywhere, also in a destructor.
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
        self._allocate = allocate or HostMemory()
        self._slabs: list[weakref.ref[_Slab]] = []
        self.peak = 0

    @property
    def used(self) -> int:
        """Bytes in pieces that are out."""
        return sum(slab.ground.used for slab in self._living())

    @property
    def reserved(self) -> int:
        """Bytes in slabs."""
        return sum(slab.memory.numel() for slab in self._living())

    def take(self, size: int, device: torch.device) -> list[Piece] | None:
        """Pieces that hold `size` bytes of a device together, or nothing if the limit does not allow it."""
        pieces: list[Piece] = []
        while size > 0:
            part = min(round_up(size), self._longest_piece(device))
            try:
                piece = self._cut(part, device) if part else None
            except RuntimeError:  # no memory left: what was taken goes back now, and not with the traceback
                pieces.clear()
                raise
            if piece is None:
                return None
            pieces.append(piece)
            size -= part
        self.peak = max(self.peak, self.used)
        return pieces

    def _living(self) -> list[_Slab]:
        """Slabs that are used: their pieces hold them, and the pool does not."""
        slabs = [slab for slab in (reference() for reference in self._slabs) if slab is not None]
        self._slabs = [weakref.ref(slab) for slab in slabs]
        return slabs

    def _longest_piece(self, device: torch.device) -> int:
        """The most bytes that one piece can have: those of a new slab, or of the longest free range."""
        free = (slab.ground.longest for slab in self._living() if slab.device == device)
        return max([self._next_slab(), *free])

    def _next_slab(self) -> int:
        """The size of the next slab; 0 if the limit allows none."""
        reserved = self.reserved
        size = _slab_after(reserved, self._smallest, self._largest)
        if self._limit is None:
            return size
        return max(0, min(size, round_down(self._limit - reserved)))

    def _cut(self, size: int, device: torch.device) -> Piece | None:
        """A piece no longer than the longest, of a new slab if no free range is long enough."""
        for slab in self._living():
            cut = slab.ground.cut(size) if slab.device == device else None
            if cut is not None:
                return Piece(slab, cut)
        length = self._next_slab()
        slab = _Slab(self._allocate(length), device, RangeAllocator(length))
        self._slabs.append(weakref.ref(slab))
        cut = slab.ground.cut(size)
        return None if cut is None else Piece(slab, cut)  # a new slab always has room


def pinned_for(used: int) -> int:
    """Bytes of the slabs that hold `used` bytes, if they are filled to the end."""
    reserved = 0
    while reserved < used:
        reserved += _slab_after(reserved, *SLAB_BYTES)
    return reserved


def _slab_after(reserved: int, smallest: int, largest: int) -> int:
    size = smallest
    while size < min(reserved, largest):
        size *= 2
    return size
