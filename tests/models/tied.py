"""A decoder whose loss is computed chunk by chunk, so that its head's weight has several gradients to sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, CLASSES, LENGTH = 128, 2048, 8


class Tied(nn.Module):
    """An embedding, two layers and a head: the embedding's weight, or one that is multiplied without a transpose."""

    def __init__(self, *, tied: bool, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
        self.head = self.embedding.weight if tied else nn.Parameter(torch.ones(WIDTH, CLASSES))
        self.tied = tied

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden) + hidden
        parts = zip(hidden.chunk(self.chunks, dim=1), labels.chunk(self.chunks, dim=1), strict=True)
        losses = [
            F.cross_entropy(self.scores(part).flatten(0, 1).float(), wanted.flatten(), reduction="sum")
            for part, wanted in parts
        ]
        return (torch.stack(losses).sum() / labels.numel(),)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.head.t() if self.tied else self.head)


def tied_batch(device: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(LENGTH, device=device).reshape(1, LENGTH)
    return {"ids": ids, "labels": ids.clone()}
