"""A real training step of a small model on the CPU, and what torch's profiler says about its memory.

The profiler hears of every allocation from the allocator itself: it knows nothing of tensors, graphs or policies, which
makes it a judge of the simulator.
"""

from __future__ import annotations

import functools
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


def train(model: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    model(**batch).loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def step_in_backward(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """An optimizer for each weight, and a hook that takes its step and frees the gradient."""
    optimizers = [torch.optim.AdamW([parameter], lr=1e-4, foreach=True) for parameter in parameters]
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        parameter.register_post_accumulate_grad_hook(functools.partial(_step, optimizer))
    return optimizers


def _step(optimizer: torch.optim.Optimizer, _parameter: nn.Parameter) -> None:
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
    events = sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0))
    promotions = _promotions(events)
    set_aside: set[int] = set()
    now = peak = 0
    for event in events:
        if event.get("name") != "[memory]":
            continue
        address, change = event["args"]["Addr"], event["args"]["Bytes"]
        if change > 0 and any(start <= event["ts"] <= end for start, end in promotions):
            set_aside.add(address)
        elif change < 0 and address in set_aside:
            set_aside.remove(address)
        else:
            now += change
            peak = max(peak, now)
    return peak


def _promotions(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """When an operand was copied to the wider type of the other: the CPU's kernels do, an accelerator's convert it as
    they read."""
    elementwise = [*_spans(events, "aten::mul"), *_spans(events, "aten::add")]
    return [
        (start, end)
        for start, end in _spans(events, "aten::to")
        if any(first <= start and end <= last for first, last in elementwise)
    ]


def _spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    found = [event for event in events if event.get("name") == name and event.get("ph") == "X"]
    return [(event["ts"], event["ts"] + event["dur"]) for event in found]


def real_peak(model: nn.Module, batch: dict[str, Any], policy: str, *, in_backward: bool = False) -> int:
    """The peak of the second step of a real run: weights, states and all."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if in_backward:
        optimizer, optimizers = None, step_in_backward(trained)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
        optimizers = [optimizer]
    with lowtide.apply(model, policy):
        train(model, batch, optimizer)
        states = [value for each in optimizers for state in each.state.values() for value in state.values()]
        standing = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *states)}
        inputs = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
        return sum(standing.values()) + inputs + profiled_peak(lambda: train(model, batch, optimizer))
