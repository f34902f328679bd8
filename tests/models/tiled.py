"""A model whose MLPs, experts and loss run in tiles, if it is told to; in double precision."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from models.routed import Routed

WIDTH, CLASSES, EXPERTS = 16, 30, 4
LENGTHS = (23, 41)  # of the two ranks: other lengths, and so other numbers of tiles


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 40, bias=False, dtype=torch.double) for _ in range(2))
        self.down = nn.Linear(40, WIDTH, dtype=torch.double)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, *, routed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.double)
        self.mlp = Routed(WIDTH, [Mlp() for _ in range(EXPERTS)]) if routed else Mlp()
        self.tokens = None

    def forward(self, x):
        normed = self.norm(x)
        out = self.mlp(normed) if self.tokens is None else lowtide.tile(self.mlp, normed, tokens=self.tokens)
        if isinstance(out, tuple):
            return x + out[0], out[1].logsumexp(-1).square().mean()
        return x + out, 0.0


class Model(nn.Module):
    def __init__(self, *, routed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH, dtype=torch.double)
        self.layers = nn.ModuleList(Layer(routed=routed) for _ in range(2))
        self.tokens = None

    def tile(self, tokens):
        for module in (self, *self.layers):
            module.tokens = tokens
        return self

    def forward(self, ids):
        """The loss, with a tied head and the routers' own."""
        x, extra = self.embed(ids), 0.0
        for layer in self.layers:
            x, router_loss = layer(x)
            extra = extra + 0.1 * router_loss
        if self.tokens is not None:
            return extra + lowtide.linear_cross_entropy(x, self.embed.weight, ids, shift=True, tokens=self.tokens)
        logits = (x @ self.embed.weight.t())[:, :-1]
        return extra + F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def model(*, routed: bool = False, unused_expert: bool = False) -> Model:
    torch.manual_seed(0)
    built = Model(routed=routed)
    if unused_expert:
        with torch.no_grad():  # tokens of rank 0 and of rank 1 choose different experts
            for layer in built.layers:
                layer.mlp.router.weight.zero_()
                layer.mlp.router.weight[0, 0] = 50
                layer.mlp.router.weight[1, 0] = -50
            built.embed.weight[: CLASSES // 2, 0] = 5
            built.embed.weight[CLASSES // 2 :, 0] = -5
    return built


def batch(rank: int, step: int = 0) -> torch.Tensor:
    torch.manual_seed(100 + 10 * step + rank)
    half = CLASSES // 2
    return torch.randint(rank * half, (rank + 1) * half, (2, LENGTHS[rank]))
