"""`lowtide.tile`: runs token-wise functions in tiles, so that one tile's intermediates exist at a time."""

from __future__ import annotations

from lowtide.tiling.tile import tile

__all__ = ["tile"]
