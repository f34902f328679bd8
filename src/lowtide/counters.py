"""Counts what really happens in regions and tiled modules, where it happens."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RegionLedger:
    """The counts of one region since its policy was applied. Bytes count tensors that are saved at its boundary."""

    name: str
    forwards: int = 0
    """Calls with gradients enabled."""
    recomputes: int = 0
    """How often its forward was run again in backward."""
    nested: int = 0
    """Calls inside another checkpoint, which decides what is kept."""
    saved_bytes: int = 0
    """Bytes that were saved; what regions share is counted once."""
    movable_bytes: int = 0
    """Bytes that a store could take, without small tensors and parameters; what regions share is counted for each."""
    unmovable_bytes: int = 0
    """Bytes of large tensors that no store can take: subclasses, unusual layouts, views of a small part."""
    hidden: int = 0
    """Calls whose inputs may be hidden: in an argument of an unknown kind, or in none of the arguments."""
    packed_bytes: int = 0
    """Bytes that were moved to a store."""
    restored_bytes: int = 0
    """Bytes that were brought back in backward."""
    declined_bytes: int = 0
    """Bytes that a store had no room for."""
    inner_bytes: int = 0
    """Bytes that its first recompute saved, without weights, inputs and kept outputs, which its forward left alive."""
    kept_outputs: int = 0
    """Outputs of operators that were kept in forward, by `recompute(keep=...)`."""
    recalled_outputs: int = 0
    """How often a recompute took a kept output instead of computing it."""

    @property
    def is_small(self) -> bool:
        """Return whether it ran, and all that it saved are small tensors and weights, which no store would take."""
        unseen = self.nested or self.hidden or self.unmovable_bytes
        return self.forwards > 0 and not self.movable_bytes and not unseen

    @property
    def kept_bytes(self) -> int:
        """Return the saved bytes that stayed on the device: shared, small, beyond a limit, or the last region's."""
        return self.saved_bytes - self.packed_bytes


@dataclasses.dataclass
class TileLedger:
    """The counts of one tiled module since its policy was applied."""

    name: str
    calls: int = 0
    tiles: int = 0
    """Tiles that were run in forward; as many as calls if no call was long enough to be split."""
    recomputed_tiles: int = 0
    """Tiles that were run again in backward."""
    left_alone: str = ""
    """Why calls that are long enough run whole all the same, if they do: the first reason."""
    left_alone_calls: int = 0
    """How many calls that are long enough ran whole all the same."""
