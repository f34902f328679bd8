"""The tokens of one call: how they are laid out, and how they are cut into tiles.

Everything but the last dimension of the input counts tokens. Tiles are contiguous runs of them, and keep a batch
dimension of one if there was a batch: a tile of `[4, 1000, 64]` is `[1, t, 64]`.
"""

from __future__ import annotations

import itertools

import torch


class TokenGrid:
    """The token dimensions of a call, and the sizes of its tiles."""

    def __init__(self, lead: torch.Size, tiles: int) -> None:
        self.lead = lead
        self.count = lead.numel()
        self.sizes = _even_sizes(self.count, tiles)
        self.starts = [0, *itertools.accumulate(self.sizes)][:-1]
        self.flat_lead = (1, self.count) if len(lead) > 1 else (self.count,)
        self.dim = len(self.flat_lead) - 1

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a row for each token; such tensors are cut along with the input."""
        return tensor.shape[: len(self.lead)] == self.lead

    def cut(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tiles of a tensor that covers the tokens.

        Each is a plain tensor to look at: a batch dimension of one keeps no trace of the whole in its stride, by which
        torch chooses how to multiply. A tile must look the same when it is run again.
        """
        flat = tensor.reshape(*self.flat_lead, *tensor.shape[len(self.lead) :])
        return tuple(part.view(part.shape) for part in torch.split(flat, self.sizes, self.dim))

    def part(self, flat: torch.Tensor, index: int, dim: int) -> torch.Tensor:
        """The rows of one tile in a tensor that has the tokens in one dimension."""
        return flat.narrow(dim, self.starts[index], self.sizes[index])


def _even_sizes(count: int, tiles: int) -> list[int]:
    """Sizes that differ by one at most: a short last tile would cost as many launches as a whole one."""
    small, larger = divmod(count, tiles)
    return [small + 1] * larger + [small] * (tiles - larger)
