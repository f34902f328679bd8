"""Chains of regions that count their calls: what several test modules run."""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from support.devices import DEVICE

TOKENS, WIDTH = 64, 32
BOUNDARY = TOKENS * WIDTH * 4  # bytes of one hidden state


class Seen:
    """Counts outside of a module: what a forward counts in the module's own attributes is put back."""

    calls = 0


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), Seen()

    def forward(self, x):
        self.seen.calls += 1
        return self.linear(x).tanh()


def chain(layers, x, schedule):
    for layer in layers:
        x = lowtide.checkpoint(layer, x, offload=schedule)
    return x


def counted_layers(count=3):
    torch.manual_seed(0)
    return nn.ModuleList(Counted() for _ in range(count)).to(DEVICE)


def leaf():
    torch.manual_seed(1)
    return torch.randn(TOKENS, WIDTH).to(DEVICE).requires_grad_()


def reference_grad(layers, x, times=1):
    y = x
    for layer in layers:
        y = layer(y)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    for layer in layers:
        layer.seen.calls = 0
    return (grad * times).cpu()


class Twice(torch.autograd.Function):
    """A square whose backward reads its saved tensors twice: mamba#1020."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        return grad * (x + again)
