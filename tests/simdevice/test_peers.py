"""Other people's engines on the device, unmodified."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import simdevice
from models.attending import Block
from support import needs_trl_on_any_device
from support.foreign_warnings import ignore_warnings_of


def run(layers: nn.Module, x: torch.Tensor, *, checkpointing: bool) -> torch.Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)
    return x


@needs_trl_on_any_device
@ignore_warnings_of("torch", "trl")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trl_offload_with_streams_runs_clean_and_exact(sim, checkpointing):
    from trl.models.activation_offloading import OffloadActivations

    results = {}
    for name in ("plain", "trl"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(32) for _ in range(4))).to(sim)
        x = torch.randn(2, 64, 32).to(sim)
        simdevice.reset()
        for _ in range(2):
            with OffloadActivations(use_streams=True) if name == "trl" else torch.enable_grad():
                loss = run(model, x, checkpointing=checkpointing).square().mean()
            loss.backward()
        results[name] = [p.grad.cpu() for p in model.parameters()]
        stats = simdevice.stats()
    assert stats.d2h_bytes > 2 * 64 * 32 * 4
    assert stats.h2d_bytes > 0
    assert simdevice.violations() == []
    for ours, plain in zip(results["trl"], results["plain"], strict=True):
        assert torch.equal(ours, plain)
