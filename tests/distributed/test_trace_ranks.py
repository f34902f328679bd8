"""A trace under DDP and FSDP2: the same gradients, the same saved bytes, and gathered weights that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from support.launcher import run_ranks

LAYERS, TOKENS, WIDTH, INNER = 3, 32, 64, 256
BOUNDARY = TOKENS * WIDTH * 4
LAYER = (2 * WIDTH * INNER + WIDTH + INNER) * 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def wrapped(net: Net, engine: str) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (2,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def traced(rank: int, engine: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    lowtide.apply(net, "recompute")
    model = wrapped(net, engine)
    x = torch.full((TOKENS, WIDTH), 0.1 * (rank + 1))
    gradients = []
    for context in (torch.enable_grad(), lowtide.trace(model)):
        model.zero_grad()
        with context as seen:
            model(x).square().mean().backward()
        gradients.append([getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    gradient_bytes = sum(gradient.nbytes for gradient in gradients[0])
    return {
        "regions": seen.regions,
        "recomputes": [region.recomputes for region in seen.by_region()],
        "saved": [seen.saved[name] for name in seen.regions],
        "gradients": (seen.samples[-1].nbytes["gradients"], gradient_bytes),
        "batch": (seen.samples[-1].nbytes["batch"], x.nbytes),
        "weights": [sample.nbytes["weights"] for sample in seen.samples],
    }


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_trace_on_two_ranks(engine: str):
    for seen in run_ranks(traced, engine):
        assert seen["regions"] == [f"layers.{place}" for place in range(LAYERS)]
        assert seen["recomputes"] == [1] * LAYERS
        # gloo's thread may hold on to what it gathered for a moment after FSDP2 has let go of it
        held = {0, LAYER} if engine == "fsdp2" else {0}
        assert {saved - BOUNDARY for saved in seen["saved"]} <= held
        for kind in ("gradients", "batch"):
            found, expected = seen[kind]
            assert found == expected, kind
        weights = seen["weights"]
        if engine == "ddp":
            assert set(weights) == {LAYERS * LAYER}
        else:
            assert weights[0] == weights[-1] == LAYERS * LAYER // 2, "a shard"
            assert max(weights) >= weights[0] + LAYER, "and a layer that was gathered"
