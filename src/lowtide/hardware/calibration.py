"""Measures what share of its data sheet this machine's accelerator reaches, so that plans have better seconds.

It takes about a minute. Four kinds of kernels stand for all: a matrix product, flash attention (forward and backward),
a copy within device memory, and a copy over the link from pinned memory. Each is timed with events after a warm-up, and
the median counts.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import PlanError
from lowtide.hardware.accelerators import Efficiencies, this_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lowtide.hardware.accelerators import Accelerator

_REPEATS = 20
_MATRIX = 8192
_SEQUENCE, _HEADS, _WIDTH = 8192, 16, 128
_COPY = 256 * 2**20
"""Bytes that are copied."""


def calibrate(path: Path, device: Accelerator | None = None) -> Efficiencies:
    """Measure this machine's accelerator, and write the file that `plan(calibration=...)` reads."""
    if not torch.accelerator.is_available():
        raise PlanError("there is no accelerator here to calibrate: run this on the machine that will train")
    accelerator = device or this_accelerator()
    found = measure(accelerator, torch.accelerator.current_accelerator() or torch.device("cuda"))
    content = {"accelerator": accelerator.name, "efficiencies": dataclasses.asdict(found)}
    path.write_text(json.dumps(content, indent=2))
    return found


def measure(accelerator: Accelerator, device: torch.device) -> Efficiencies:
    """Time each kind of kernel on `device`, and return its share of `accelerator`'s peak, at most 1."""
    half = torch.bfloat16 if accelerator.has_flash else torch.float16
    square = torch.randn(_MATRIX, _MATRIX, dtype=half, device=device)
    matmul = 2 * _MATRIX**3 / _seconds(lambda: square @ square, device) / accelerator.half_flops
    forward, backward = _attention(half, device)
    source, target = (torch.empty(_COPY, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2 * _COPY / _seconds(lambda: target.copy_(source), device) / accelerator.bandwidth
    pinned = torch.empty(_COPY, dtype=torch.uint8, pin_memory=True)
    link = _COPY / _seconds(lambda: target.copy_(pinned, non_blocking=True), device) / accelerator.link
    return Efficiencies(
        matmul=_share(matmul),
        attention=_share(forward / accelerator.half_flops),
        attention_backward=_share(backward / accelerator.half_flops),
        memory=_share(memory),
        link=_share(link),
    )


def _attention(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return the FLOP/s of causal attention in forward and in backward, which does two and a half times the work."""
    shape = (1, _HEADS, _SEQUENCE, _WIDTH)
    query, key, value = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    flops = 4 * _HEADS * _SEQUENCE**2 * _WIDTH / 2

    def run() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    out = run()
    gradient = torch.ones_like(out)
    forward = _seconds(run, device)
    backward = _seconds(lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True), device)
    return flops / forward, 2.5 * flops / backward


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        before, after = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return max(statistics.median(times), 1e-9)


def _share(value: float) -> float:
    return min(1.0, round(value, 4))
