"""Token-wise modules of many kinds, in double precision so that rounding cannot hide a fault."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.routed import Routed

HIDDEN, INNER, EXPERTS = 16, 40, 4


class Gated(nn.Module):
    """Llama's MLP."""

    def __init__(self, hidden=HIDDEN, inner=INNER, dtype=torch.double, bias=False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=bias, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tied(Gated):
    """Both projections are one parameter."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.up.weight = self.gate.weight


class Dropping(Gated):
    def forward(self, x):
        return F.dropout(super().forward(F.dropout(x, 0.3, self.training)), 0.2, self.training)


class Lora(nn.Module):
    """A frozen MLP with trainable low-rank parts."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Gated().requires_grad_(False)
        self.a, self.b = nn.Linear(HIDDEN, 2, dtype=torch.double), nn.Linear(2, HIDDEN, dtype=torch.double)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def routed():
    return Routed(HIDDEN, [Gated() for _ in range(EXPERTS)])


class WithArguments(Gated):
    """A residual and a mask with a row per token, a scale and a table for all of them."""

    def forward(self, x, residual, *, mask, scale, table):
        return {"out": residual + super().forward(x) * mask[..., None] * scale, "by_table": (x @ table, None)}


def batch(*lead, requires_grad=True, dtype=torch.double):
    torch.manual_seed(1)
    return torch.randn(*lead, HIDDEN, dtype=dtype).requires_grad_(requires_grad)


def build(kind, **options):
    torch.manual_seed(0)
    return kind(**options)
