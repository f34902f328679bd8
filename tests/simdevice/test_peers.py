"""Other people's engines on the device, unmodified."""

from __future__ import annotations

import pytest
import torch
from test_engines import Block
from torch import nn

from lowtide import simdevice

pytest.importorskip("trl", reason="the hf extra is not installed")


@pytest.mark.filterwarnings("ignore")
def test_trl_offload_with_streams_runs_clean_and_exact(sim):
    from trl.models.activation_offloading import OffloadActivations

    results = {}
    for name in ("plain", "trl"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(32) for _ in range(4))).to(sim)
        x = torch.randn(2, 64, 32).to(sim)
        simdevice.reset()
        for _ in range(2):
            with OffloadActivations(use_streams=True) if name == "trl" else torch.enable_grad():
                loss = model(x).square().mean()
            loss.backward()
        results[name] = [p.grad.cpu() for p in model.parameters()]
        stats = simdevice.stats()
    assert stats.d2h_bytes > 4 * 64 * 32 * 4
    assert stats.h2d_bytes > 0
    assert simdevice.violations() == []
    for ours, plain in zip(results["trl"], results["plain"], strict=True):
        assert torch.equal(ours, plain)
