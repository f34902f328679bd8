"""A real training step of a small model on the CPU, and what torch's profiler says about its memory.

The profiler hears of every allocation from the allocator itself: it knows nothing of tensors, graphs or policies, which
makes it a judge of the simulator.
"""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

import lowtide

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def train(model: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def profiled_peak(step: Callable[[], None]) -> int:
    """The most bytes that the CPU's allocator handed out at once during `step`, beyond what was there before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    changes = [
        (event["ts"], event["args"]["Bytes"]) for event in trace["traceEvents"] if event.get("name") == "[memory]"
    ]
    now = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        peak = max(peak, now)
    return peak


def real_peak(model: nn.Module, batch: dict[str, Any], policy: str) -> int:
    """The peak of the second step of a real run: weights, states and all."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    with lowtide.apply(model, policy):
        train(model, batch, optimizer)
        states = [value for state in optimizer.state.values() for value in state.values()]
        standing = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *states)}
        inputs = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
        return sum(standing.values()) + inputs + profiled_peak(lambda: train(model, batch, optimizer))
