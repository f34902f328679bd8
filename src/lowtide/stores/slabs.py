"""A bounded pool of pinned memory, cut out of slabs.

A slab serves one device: copies to and from it are in the order of that device's streams, and of no other's.

Torch's host allocator rounds every block to a power of two, which can double the memory that offload takes. So the
pool asks for slabs of one power-of-two size and cuts them itself: a large tensor is spread over several slabs, and
small ones share one. A slab goes back to torch (which caches it) when nothing in it is used.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from lowtide.errors import InvalidValueError
from lowtide.stores.memory import PAGE, HostMemory, round_up
from lowtide.stores.ranges import FreeRanges

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

ALIGNMENT = PAGE  # a page: buffers that share none can be told apart by page protection
SLAB_BYTES = (4 * 1024**2, 256 * 1024**2)
"""The smallest and the largest slab. Each new one is about as large as all before it, so a small model pins little."""


@dataclasses.dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    device: torch.device
    free: FreeRanges

    @property
    def is_empty(self) -> bool:
        return self.free.ranges == [(0, self.memory.numel())]


@dataclasses.dataclass(eq=False)
class Piece:
    """A cut of a slab."""

    slab: _Slab
    start: int
    end: int

    def bytes(self, count: int) -> torch.Tensor:
        """Its first `count` bytes."""
        return self.slab.memory[self.start : self.start + count]


class SlabPool:
    """Hands out pieces of pinned memory up to a limit in bytes; None means no limit.

    Not thread-safe: its owner locks. Only `give_back` may be called from anywhere, also from a destructor.
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
        self._slabs: list[_Slab] = []
        self._returned: collections.deque[Piece] = collections.deque()
        self._used = 0
        self.peak = 0

    @property
    def used(self) -> int:
        """Bytes in pieces that are out."""
        self.collect()
        return self._used

    @property
    def reserved(self) -> int:
        """Bytes in slabs."""
        self.collect()
        return sum(slab.memory.numel() for slab in self._slabs)

    def take(self, size: int, device: torch.device) -> list[Piece] | None:
        """Pieces that hold `size` bytes of a device together, or nothing if the limit does not allow it."""
        self.collect()
        pieces: list[Piece] = []
        while size > 0:
            part = min(size, self._next_slab())
            try:
                piece = self._cut(round_up(part), device)
            except RuntimeError:  # no pinned memory left: what was taken goes back first
                self.give_back(pieces)
                raise
            if piece is None:
                self.give_back(pieces)
                return None
            pieces.append(piece)
            self._used += piece.end - piece.start
            size -= part
        self.peak = max(self.peak, self._used)
        return pieces

    def give_back(self, pieces: list[Piece]) -> None:
        """Return pieces; they are put in order at the next call."""
        self._returned.extend(pieces)

    def _next_slab(self) -> int:
        size, reserved = self._smallest, sum(slab.memory.numel() for slab in self._slabs)
        while size < min(reserved, self._largest):
            size *= 2
        if self._limit is None:
            return size
        left = self._limit - reserved
        return max(ALIGNMENT, min(size, left // ALIGNMENT * ALIGNMENT))

    def _cut(self, size: int, device: torch.device) -> Piece | None:
        for slab in self._slabs:
            start = slab.free.cut(size) if slab.device == device else None
            if start is not None:
                return Piece(slab, start, start + size)
        length = max(self._next_slab(), size)
        if self._limit is not None and sum(s.memory.numel() for s in self._slabs) + length > self._limit:
            return None
        slab = _Slab(self._allocate(length), device, FreeRanges((size, length)))
        self._slabs.append(slab)
        return Piece(slab, 0, size)

    def collect(self) -> None:
        """Put returned pieces in order, and let go of empty slabs."""
        if not self._returned:
            return
        while self._returned:
            piece = self._returned.popleft()
            piece.slab.free.give_back(piece.start, piece.end)
            self._used -= piece.end - piece.start
        self._slabs = [slab for slab in self._slabs if not slab.is_empty]


def pinned_for(used: int) -> int:
    """Bytes of the slabs that hold `used` bytes, if they are filled to the end."""
    smallest, largest = SLAB_BYTES
    reserved = 0
    while reserved < used:
        size = smallest
        while size < min(reserved, largest):
            size *= 2
        reserved += size
    return reserved
