"""A mixture of experts as transformers has them: what several test modules run."""

from __future__ import annotations

import torch
from torch import nn


class Routed(nn.Module):
    """Unpacks three dimensions, sends each token to one expert, and returns its router's logits flat."""

    def __init__(self, width: int, experts: list[nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(width, len(experts), bias=False, dtype=torch.double)
        self.experts = nn.ModuleList(experts)

    def forward(self, x):
        batch, length, width = x.shape
        flat = x.reshape(-1, width)
        logits = self.router(flat)
        weight, chosen = logits.softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.reshape(batch, length, width), logits
