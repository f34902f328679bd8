"""Measures one training step: how long it takes, and what the device's own allocator counts.

Time is that of events on the device; the host's clock on the CPU. Bytes are those of the caching allocator. The CPU has
none, but it reports every allocation to torch's profiler, from which the same figures are added up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lowtide import simdevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lowtide.selftest.bench import Bench

NO_PEAKS = "torch's allocator for this device does not count the most bytes at once"
"""Why stages that measure peaks cannot run."""

_AFTER_FORWARD = "lowtide: after forward"
_LOG_LEVEL, _NOTHING = "KINETO_LOG_LEVEL", "99"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes that a step had on the device beyond those that were there before it."""

    after_forward: int
    peak: int
    leftover: int


def step_memory(bench: Bench, forward: Callable[[], torch.Tensor], finish: Callable[[], None]) -> StepMemory:
    """Run a step and count its bytes: `forward` returns the loss, and `finish` ends the step after its backward."""
    if bench.device.type == "cpu":
        return _step_memory_on_cpu(bench.folder, forward, finish)
    _settle(bench.device)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    loss = forward()
    _settle(bench.device)
    after_forward = torch.accelerator.memory_allocated()
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    finish()
    _settle(bench.device)
    return StepMemory(
        after_forward=after_forward - before,
        peak=torch.accelerator.max_memory_allocated() - before,
        leftover=torch.accelerator.memory_allocated() - before,
    )


def _settle(device: torch.device) -> None:
    torch.accelerator.synchronize(device)


def _step_memory_on_cpu(folder: Path, forward: Callable[[], torch.Tensor], finish: Callable[[], None]) -> StepMemory:
    def step() -> None:
        loss = forward()
        with record_function(_AFTER_FORWARD):
            pass
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        finish()

    return read_memory_events(profiled(folder, [ProfilerActivity.CPU], step, with_memory=True))


def profiled(
    folder: Path, activities: list[ProfilerActivity], run: Callable[[], Any], *, with_memory: bool = False
) -> list[dict[str, Any]]:
    """Run something under torch's profiler, and return the events of its trace."""
    with _quiet_profiler(), profile(activities=activities, profile_memory=with_memory) as profiler:
        run()
    path = folder / "profile.json"
    profiler.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    return events


def device_events(bench: Bench, run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Trace the kernels and copies of a run, as events of torch's profiler. The emulated device writes its own."""

    def traced() -> None:
        run()
        _settle(bench.device)

    _settle(bench.device)
    if not bench.is_emulated:
        return profiled(bench.folder, [ProfilerActivity.CPU, ProfilerActivity.CUDA], traced)
    with simdevice.timeline() as spans:
        traced()
    return [_event(span) for span in spans]


def _event(span: simdevice.Span) -> dict[str, Any]:
    """Write a span of the emulated device as the profiler writes those of CUDA: in microseconds."""
    memory = "Pinned" if span.pinned else "Pageable"
    ends = {"kernel": "kernel", "h2d": f"Memcpy HtoD ({memory} -> Device)", "d2h": f"Memcpy DtoH (Device -> {memory})"}
    return {
        "ph": "X",
        "cat": "kernel" if span.kind == "kernel" else "gpu_memcpy",
        "name": ends[span.kind],
        "ts": span.begin * 1e6,
        "dur": (span.end - span.begin) * 1e6,
        "args": {"stream": span.stream},
    }


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from writing about itself to stderr: it reads its level when it is first used."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = before or _NOTHING
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def read_memory_events(events: list[dict[str, Any]]) -> StepMemory:
    """Add up the allocations and frees of a profile of a step on the CPU."""
    now = peak = after_forward = 0
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("name") == _AFTER_FORWARD and event.get("ph") == "X":
            after_forward = now
        elif event.get("name") == "[memory]":
            now += event["args"]["Bytes"]
            peak = max(peak, now)
    return StepMemory(after_forward=after_forward, peak=peak, leftover=now)


def seconds_of(bench: Bench, run: Callable[[], Any]) -> float:
    """Return how long the device takes for `run`, from an idle device to an idle device."""
    if bench.device.type == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    _settle(bench.device)
    before, after = (torch.Event(device=bench.device, enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    _settle(bench.device)
    return before.elapsed_time(after) / 1e3
