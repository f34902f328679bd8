"""Token-wise modules of many kinds, in double precision so that rounding cannot hide a fault."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

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


class Routed(nn.Module):
    """A mixture of experts that unpacks three dimensions and returns its router's logits flat, as transformers' do."""

    def __init__(self, hidden=HIDDEN, experts=EXPERTS) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False, dtype=torch.double)
        self.experts = nn.ModuleList(Gated(hidden) for _ in range(experts))

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
