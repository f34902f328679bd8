"""Any token-wise module in any tiles, inside and outside a checkpoint: the untiled module's gradients."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide

WIDTH = 6


class Step(nn.Module):
    """A piece of a token-wise module, with or without weights of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH, bias=kind != "plain")
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        linear = self.linear
        kinds = {
            "plain": linear,
            "bias": linear,
            "norm": self.norm,
            "gate": lambda x: linear(x).sigmoid() * x,
            "twice": lambda x: linear(linear(x).tanh()),
            "nested": lambda x: checkpoint(lambda t: linear(t).exp() * 0.1, x, use_reentrant=False),
            "detour": lambda x: x + linear(x).detach() * x.sin(),
            "inplace": lambda x: linear(x).mul_(2).relu_(),
        }
        return kinds[self.kind](x)


class Chain(nn.Module):
    def __init__(self, kinds, frozen, tied) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step(kind) for kind in kinds)
        if tied:
            self.steps[-1].linear = self.steps[0].linear
        for step, is_frozen in zip(self.steps, frozen, strict=False):
            step.requires_grad_(not is_frozen)

    def forward(self, x, *others):
        for step in self.steps:
            x = step(x)
        return (x * others[0][..., None], x.sum(-1)) if others else x


KINDS = ["plain", "bias", "norm", "gate", "twice", "nested", "detour", "inplace"]


@settings(deadline=None, max_examples=120)
@given(
    lead=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    tokens=st.integers(1, 40),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    frozen=st.lists(st.booleans(), min_size=4, max_size=4),
    tied=st.booleans(),
    needs_grad=st.booleans(),
    per_token=st.booleans(),
    dtype=st.sampled_from([torch.double, torch.float32, torch.bfloat16]),
    recomputed=st.booleans(),
)
def test_any_module(lead, tokens, kinds, frozen, tied, needs_grad, per_token, dtype, recomputed):
    torch.manual_seed(0)
    chain = Chain(kinds, frozen, tied).to(dtype)
    x = torch.randn(*lead, WIDTH).to(dtype).requires_grad_(needs_grad)
    others = [torch.rand(*lead).to(dtype).requires_grad_()] if per_token else []

    def tiled(x, *others):
        return lowtide.tile(chain, x, *others, tokens=tokens)

    def results(run):
        leaves = [leaf for leaf in [x, *others, *chain.parameters()] if leaf.requires_grad]
        outputs = run(x, *others)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(out.double().square().sum() for out in outputs)
        found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else []
        return [*outputs, *found]

    ours = results((lambda *a: checkpoint(tiled, *a, use_reentrant=False)) if recomputed else tiled)
    expected = results(chain)
    tolerance = {torch.double: 1e-11, torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
    scale = max(b.double().norm() for b in expected if b is not None)  # a gradient may be nothing but rounding
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert (a.double() - b.double()).norm() <= tolerance * scale
