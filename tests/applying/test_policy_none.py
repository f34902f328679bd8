"""The policy `none` touches nothing: the same code runs, on the same objects."""

from __future__ import annotations

import torch

import lowtide
from models.stacked import build


def trained(policy=None):
    model = build("cpu")
    before = [dict(module.__dict__) for module in model.modules()]
    applied = lowtide.apply(model, policy) if policy else None
    if policy:
        assert [dict(module.__dict__) for module in model.modules()] == before
        assert all(module.forward.__func__ is type(module).forward for module in model.modules())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
    if applied is not None:
        assert all(region.forwards == 0 for region in applied.report().regions)
    return [p.detach() for p in model.parameters()]


def test_training_is_bit_identical_and_no_object_changes():
    assert all(torch.equal(a, b) for a, b in zip(trained("none"), trained(), strict=True))
