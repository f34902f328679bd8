"""A stack of blocks with dropout and a place for a cache, and a training step that gives loss and gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from support.devices import DEVICE

TOKENS, WIDTH, LAYERS = 64, 32, 6


BOUNDARY = TOKENS * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, *, scale=1.0, past_key_values=None):
        if past_key_values is not None:
            past_key_values.append(x)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.gradient_checkpointing = False
        self.cache = None

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, past_key_values=self.cache)
        return x


def build(device=DEVICE) -> Model:
    torch.manual_seed(0)
    return Model().to(device).train()


def batch(device=DEVICE):
    torch.manual_seed(1)
    return torch.randn(TOKENS, WIDTH).to(device)


def train_step(model, device=DEVICE):
    model.zero_grad()
    x = batch(device)
    torch.manual_seed(2)
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


def assert_same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)
