"""A stack of blocks whose saved bytes are known: each is made of two linear layers with a GELU in between."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, TOKENS, WIDTH, INNER = 4, 32, 64, 256


def boundary(itemsize: int = 4) -> int:
    """Bytes of a block's output."""
    return TOKENS * WIDTH * itemsize


def inside(itemsize: int = 4) -> int:
    """Bytes that its second linear layer and its GELU save."""
    return 2 * TOKENS * INNER * itemsize


def stack(device: str = "cpu", dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH), nn.Dropout(dropout))
        if dropout
        else nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*parts).to(device=device, dtype=dtype)


def batch(device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, TOKENS * WIDTH, dtype=dtype).reshape(TOKENS, WIDTH).to(device)


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


class Functional(nn.Module):
    """A block that calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(WIDTH, INNER) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)
