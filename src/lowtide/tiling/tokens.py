"""The tokens of one call: how they are laid out, and how they are cut into tiles and joined again.

Everything but the last dimension of the input counts tokens. Tiles are contiguous runs of them, and keep a batch
dimension of one if there was a batch: a tile of `[4, 1000, 64]` is `[1, t, 64]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import NotTokenWiseError
from lowtide.slots import take_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence


class TokenGrid:
    """The token dimensions of a call, and the sizes of its tiles."""

    def __init__(self, lead: torch.Size, tiles: int) -> None:
        self.lead = lead
        self.count = lead.numel()
        self.sizes = _even_sizes(self.count, tiles)
        self._flat_lead = (1, self.count) if len(lead) > 1 else (self.count,)
        self._dim = len(self._flat_lead) - 1

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a row for each token; such tensors are cut along with the input."""
        return tensor.shape[: len(self.lead)] == self.lead

    def cut(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tiles of a tensor that covers the tokens."""
        flat = tensor.reshape(*self._flat_lead, *tensor.shape[len(self.lead) :])
        return torch.split(flat, self.sizes, self._dim)

    def join(self, outputs: Sequence[Any]) -> Any:
        """One output from those of all tiles: any nesting, each tensor with a row per token."""
        rows, frame = [], None
        for output in outputs:
            tensors, one = take_tensors(output)
            frame = frame or one
            rows.append(tensors)
        if len({len(tensors) for tensors in rows}) != 1:
            raise NotTokenWiseError("its tiles return different numbers of tensors")
        joined = [self._join(tiles, position) for position, tiles in enumerate(zip(*rows, strict=True))]
        return frame.fill(tuple(joined))  # type: ignore[union-attr]  # there is at least one tile

    def _join(self, tiles: tuple[torch.Tensor, ...], position: int) -> torch.Tensor:
        sizes = list(zip(tiles, self.sizes, strict=True))
        if all(tile.shape[: self._dim + 1] == (*self._flat_lead[:-1], size) for tile, size in sizes):
            return torch.cat(tiles, self._dim).reshape(*self.lead, *tiles[0].shape[self._dim + 1 :])
        if all(tile.shape[:1] == (size,) for tile, size in sizes):
            return torch.cat(tiles)  # flattened by the module itself, as router logits are
        raise NotTokenWiseError(
            f"for {self.sizes[0]} tokens, its output {position} has the shape {tuple(tiles[0].shape)}: "
            "no dimension that counts tokens"
        )


def _even_sizes(count: int, tiles: int) -> list[int]:
    """Sizes that differ by one at most: a short last tile would cost as many launches as a whole one."""
    small, larger = divmod(count, tiles)
    return [small + 1] * larger + [small] * (tiles - larger)
