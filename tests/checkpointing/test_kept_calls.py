"""One function of torch, called in several ways in one region: each of its calls is kept for what it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide


class FusedAndWrittenOut(nn.Module):
    """As T5's decoder: a bias that is trained has attention written out, and without one it is fused."""

    def __init__(self, *, fused_first: bool) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(24, 24))
        self.masks = (None, True) if fused_first else (True, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mask in self.masks:
            y = self.project(x)[None, None]
            bias = None if mask is None else self.bias
            x = x + nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=bias)[0, 0]
        return x.tanh()  # whose result is saved: a recompute goes to the end


@pytest.mark.parametrize("fused_first", [False, True])
def test_attention_that_is_fused_in_one_call_and_written_out_in_another(fused_first: bool):
    torch.manual_seed(0)
    model = nn.Sequential(*(FusedAndWrittenOut(fused_first=fused_first) for _ in range(2)))
    x = torch.randn(24, 16, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    with lowtide.apply(model, "recompute(keep=attention)", regions=["0", "1"]) as applied:
        for step in (1, 2, 3):  # the first is looked at closely, the others are not
            (kept,) = torch.autograd.grad(model(x).square().sum(), x)
            assert torch.equal(kept, plain)
            counts = [(region.kept_outputs, region.recalled_outputs) for region in applied.report().regions]
            assert counts == [(2 * step, 2 * step)] * 2
