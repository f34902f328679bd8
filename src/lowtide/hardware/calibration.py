"""Measures what share of its data sheet this machine's accelerator reaches, so that plans have better seconds.

It takes about a minute. Four kinds of kernels stand for all: a matrix product, flash attention (forward and backward),
a copy within device memory, and a copy over the link from pinned memory. Each is timed with events after a warm-up, and
the median counts.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import PlanError
from lowtide.hardware.accelerators import Efficiencies, this_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lowtide.hardware.accelerators import Accelerator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """The sizes of the kernels that are timed. The defaults keep a large GPU busy; a slow device needs smaller ones."""

    matrix: int = 8192
    sequence: int = 8192
    heads: int = 16
    width: int = 128
    copy: int = 256 * 2**20
    """Bytes that are copied."""
    repeats: int = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a device's kernels and copies reach: FLOP/s and bytes per second."""

    matmul: float
    attention: float
    attention_backward: float
    memory: float
    link: float
    """Copies from pinned memory to the device."""
    link_to_host: float

    def shares_of(self, accelerator: Accelerator) -> Efficiencies:
        """Return the shares of an accelerator's data sheet that were reached, each at most 1."""
        return Efficiencies(
            matmul=_share(self.matmul / accelerator.half_flops),
            attention=_share(self.attention / accelerator.half_flops),
            attention_backward=_share(self.attention_backward / accelerator.half_flops),
            memory=_share(self.memory / accelerator.bandwidth),
            link=_share(self.link / accelerator.link),
        )


def calibrate(path: Path, device: Accelerator | None = None, probe: Probe | None = None) -> Efficiencies:
    """Measure this machine's accelerator, and write the file that `plan(calibration=...)` reads."""
    if not torch.accelerator.is_available():
        raise PlanError("there is no accelerator here to calibrate: run this on the machine that will train")
    accelerator = device or this_accelerator()
    half = torch.bfloat16 if accelerator.has_flash else torch.float16
    here = torch.accelerator.current_accelerator() or torch.device("cuda")
    found = measure(here, half, probe or Probe()).shares_of(accelerator)
    content = {"accelerator": accelerator.name, "efficiencies": dataclasses.asdict(found)}
    path.write_text(json.dumps(content, indent=2))
    return found


def measure(device: torch.device, dtype: torch.dtype, probe: Probe) -> Measured:
    """Time each kind of kernel on a device, in numbers of type `dtype`."""
    timer = _Timer(device, probe.repeats)
    square = torch.randn(probe.matrix, probe.matrix, dtype=dtype, device=device)
    matmul = 2 * probe.matrix**3 / timer.seconds(lambda: square @ square)
    forward, backward = _attention(timer, dtype, probe)
    source, target = (torch.empty(probe.copy, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2 * probe.copy / timer.seconds(lambda: target.copy_(source))
    host = torch.empty(probe.copy, dtype=torch.uint8, pin_memory=device.type != "cpu")
    return Measured(
        matmul=matmul,
        attention=forward,
        attention_backward=backward,
        memory=memory,
        link=probe.copy / timer.seconds(lambda: target.copy_(host, non_blocking=True)),
        link_to_host=probe.copy / timer.seconds(lambda: host.copy_(target, non_blocking=True)),
    )


def _attention(timer: _Timer, dtype: torch.dtype, probe: Probe) -> tuple[float, float]:
    """Return the FLOP/s of causal attention in forward and in backward, which does two and a half times the work."""
    shape = (1, probe.heads, probe.sequence, probe.width)
    query, key, value = (torch.randn(shape, dtype=dtype, device=timer.device, requires_grad=True) for _ in range(3))
    flops = 4 * probe.heads * probe.sequence**2 * probe.width / 2

    def run() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    out = run()
    gradient = torch.ones_like(out)
    forward = timer.seconds(run)
    backward = timer.seconds(lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True))
    return flops / forward, 2.5 * flops / backward


@dataclasses.dataclass(frozen=True)
class _Timer:
    """Times work on a device: by its events, or on the CPU by the clock."""

    device: torch.device
    repeats: int

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the median after a warm-up."""
        run()
        once = self._once_on_cpu if self.device.type == "cpu" else self._once
        return max(statistics.median(once(run) for _ in range(self.repeats)), 1e-9)

    def _once(self, run: Callable[[], Any]) -> float:
        before, after = (torch.Event(device=self.device, enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    @staticmethod
    def _once_on_cpu(run: Callable[[], Any]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began


def _share(value: float) -> float:
    return min(1.0, round(value, 4))
