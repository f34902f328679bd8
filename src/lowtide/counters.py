"""Ledgers: what really happened in a region, counted where it happens."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RegionLedger:
    """The counts of one region since it was applied. Bytes are those of tensors that autograd saved at its boundary."""

    name: str
    forwards: int = 0
    """Calls in training, with gradients on."""
    recomputes: int = 0
    """Times its forward was run again in backward."""
    nested: int = 0
    """Calls inside somebody else's checkpoint, which decides what is kept."""
    saved_bytes: int = 0
    """Bytes that were saved; what regions share is counted once."""
    movable_bytes: int = 0
    """Bytes that a store could take: not small, not a parameter's; what regions share is counted for each."""
    packed_bytes: int = 0
    """Bytes that were moved to a store."""
    restored_bytes: int = 0
    """Bytes that were brought back in backward."""
    declined_bytes: int = 0
    """Bytes that a store had no room for."""

    @property
    def kept_bytes(self) -> int:
        """Saved bytes that stayed on the device: shared, small, beyond a limit, or of the last region."""
        return self.saved_bytes - self.packed_bytes


@dataclasses.dataclass
class TileLedger:
    """The counts of one tiled module since it was applied."""

    name: str
    calls: int = 0
    tiles: int = 0
    """Tiles run in forward; as many as calls if nothing was long enough to be cut."""
    recomputed_tiles: int = 0
    """Tiles run again in backward."""
