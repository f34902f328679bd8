"""Python overhead of a checkpointed region: ours against torch's, on layers so small that Python dominates.

The two are run in turn, many times, and compared by the median of the ratios of neighbours: what the machine does
meanwhile hits both.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, ROUNDS = 50, 60


def step(layers: nn.ModuleList, run: Callable[..., torch.Tensor]) -> float:
    x = torch.ones(1, 8, requires_grad=True)
    start = time.perf_counter()
    for layer in layers:
        x = run(layer, x)
    x.sum().backward()
    return time.perf_counter() - start


def theirs(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def ratio(ours: Callable[..., torch.Tensor]) -> float:
    """Median of ours over torch's, interleaved."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS))
    step(layers, ours)
    return statistics.median(step(layers, ours) / step(layers, theirs) for _ in range(ROUNDS))


def applied_ratio() -> float:
    """The same through `apply`: blocks call themselves."""
    plain = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS))
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS))
    with lowtide.apply(model, "recompute"):
        step(model, lambda layer, x: layer(x))
        return statistics.median(step(model, lambda layer, x: layer(x)) / step(plain, theirs) for _ in range(ROUNDS))


def main() -> dict[str, float]:
    torch.set_num_threads(1)
    return {"lowtide.checkpoint / torch": ratio(lowtide.checkpoint), "lowtide.apply / torch": applied_ratio()}


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value:.3f}")
