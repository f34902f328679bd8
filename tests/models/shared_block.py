"""A model that runs one of its blocks twice and has a layer that nothing uses, with a batch for each rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, TOKENS = 32, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, *, hidden):
        return hidden + self.down(F.gelu(self.up(hidden)))


class Model(nn.Module):
    """Runs its first block twice: shared weights are what reentrant checkpointing trips over under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in (self.layers[0], *self.layers):
            x = layer(hidden=x)
        return x


def model() -> Model:
    torch.manual_seed(0)
    return Model().train()


def batch(rank: int) -> torch.Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(TOKENS, WIDTH)
