"""A bounded pool of pinned memory, cut out of slabs.

A slab serves one device: copies to and from it are in the order of that device's streams, and of no other's.

Torch's host allocator rounds every block to a power of two, which can double the memory that offload takes. So the
pool asks for slabs of power-of-two sizes and cuts them itself: a large tensor is spread over several slabs, in as few
pieces as there is room for, and small ones share one. A slab goes back to torch (which caches it) when nothing in it
is used.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

from lowtide.errors import InvalidValueError
from lowtide.stores.memory import PAGE, HostMemory, round_down, round_up
from lowtide.stores.ranges import Ground

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lowtide.stores.ranges import Cut

ALIGNMENT = PAGE  # a page: buffers that share none can be told apart by page protection
SLAB_BYTES = (4 * 1024**2, 256 * 1024**2)
"""The smallest and the largest slab. Each new one is about as large as all before it, so a small model pins little."""


@dataclasses.dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    device: torch.device
    ground: Ground


@dataclasses.dataclass(eq=False)
class Piece:
    """A cut of a slab; free again when nobody holds it."""

    slab: _Slab
    cut: Cut

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
        slab = _Slab(self._allocate(length), device, Ground(length))
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
