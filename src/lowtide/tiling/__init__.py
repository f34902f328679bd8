"""`lowtide.tile`: token-wise compute in tiles, one tile's intermediates at a time."""

from __future__ import annotations

from lowtide.tiling.tile import tile

__all__ = ["tile"]
