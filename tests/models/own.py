"""A model that is nobody's but its author's: no configuration, own names, a loss of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, TOKENS, CLASSES = 64, 512, 100


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if int(ids.max()) >= CLASSES:  # looks at values
            raise ValueError("no such class")
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Stack(nn.Sequential):
    """A model that is a stack itself: its regions are `0`, `1` and `2`."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def batch(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    ids = torch.arange(tokens, device="cpu").remainder(CLASSES)[None]
    return {"ids": ids, "labels": ids.clone()}


def tiny() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Own(), batch()


def sized(tokens: int = TOKENS) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Its argument says how long its batch is."""
    return Own(), batch(tokens)


def small() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Its batch is so short that no activation is worth moving."""
    return Own(), batch(tokens=4)


def blank() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Its batch is made where new tensors have no values."""
    ids = torch.randint(0, CLASSES, (1, TOKENS))
    return Own(), {"ids": ids, "labels": ids}
