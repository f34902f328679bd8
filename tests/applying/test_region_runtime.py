"""A region at work: what it takes for the model's own memory, and what an error in it leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.applying.region_runtime import ModelMemory
from support.devices import DEVICE

SHAPE = (64, 64)


def leaf(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(SHAPE, dtype=dtype).to(DEVICE).requires_grad_()


def test_the_guard_survives_a_backward_that_failed(device, monkeypatch):
    from lowtide.applying import region_runtime

    monkeypatch.setattr(region_runtime, "run_region", lambda forward, args, kwargs, *_, **__: forward(*args, **kwargs))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(2))).to(device).train()
    lowtide.apply(model, "recompute")
    x = leaf()
    x.register_hook(lambda _: (_ for _ in ()).throw(ValueError("mine")))
    with pytest.raises(ValueError, match="mine"):
        model(x).sum().backward()
    with pytest.raises(lowtide.LowtideError, match="expected a recompute"):
        model(leaf()).sum().backward()


def test_parameters_that_came_later_are_known_as_the_models_own(device):
    """`load_state_dict(assign=True)` replaces all parameters but those that it does not name."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))).to(device)
    owned = ModelMemory(model)
    owned.enter("0")
    model[1][0].weight = nn.Parameter(torch.randn(64, 64, device=device))
    assert not owned.holds(model[1][0].weight)
    owned.enter("1")
    assert not owned.holds(model[1][0].weight)
    owned.enter("0")
    assert owned.holds(model[1][0].weight.view(-1))
    assert not owned.holds(torch.empty(64, device=device))
