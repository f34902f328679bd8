"""The stage `overlaps`: do copies run beside kernels, and how fast are the links?

Steps are timed in turns: one of each policy, then the next round, so that a device that grows warm slows all of them.
Copies that are not hidden make a step longer: the share that is hidden is what offload's copies would take by
themselves, at the rate of the link as measured, less what they add to a step with recompute alone. On CUDA, a trace of
torch's profiler also shows it, and on which streams the copies ran.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from lowtide.auditing.result import Verdict
from lowtide.hardware import calibration
from lowtide.selftest.meters import profiled, seconds_of
from lowtide.selftest.record import Row, StageResult
from lowtide.selftest.steps import PLAIN, twins
from lowtide.selftest.thresholds import THRESHOLDS
from lowtide.targets.job import DTYPES

if TYPE_CHECKING:
    from lowtide.hardware.calibration import Measured
    from lowtide.selftest.bench import Bench
    from lowtide.selftest.steps import Twin

RECOMPUTE, OFFLOAD = "recompute", "recompute+offload"
POLICIES = (
    PLAIN,
    RECOMPUTE,
    OFFLOAD,
    "recompute(keep=attention)",
    "recompute+tile(mlp, loss, tokens=128, loss_tokens=128)",
)

Spans = list[tuple[float, float]]
"""Times of begin and end."""


def run(bench: Bench) -> StageResult:
    """Time steps, links and disk, and judge how much of the copies' time is hidden."""
    bench.show("links and kernels")
    rates = measure_rates(bench)
    with twins(bench, POLICIES) as made:
        seconds, moved = time_in_turns(bench, made)
        traced = _trace(bench, made[OFFLOAD]) if bench.device.type == "cuda" else []
    rows = [_time_row(policy, seconds[policy], seconds[PLAIN]) for policy in POLICIES]
    bench.show("disk")
    rows += [*_link_rows(bench, rates), _disk_row(bench)]
    if not bench.has_streams:
        why = f"a device of type {bench.device.type} has no copies that could overlap with kernels"
        return StageResult(name="overlaps", rows=rows, why=why)
    rows.append(_hidden_row(bench, seconds, moved, rates))
    return StageResult(name="overlaps", rows=rows + traced)


def measure_rates(bench: Bench) -> Measured:
    """Time kernels and copies as `lowtide calibrate` does, in numbers as wide as the workload's."""
    return calibration.measure(bench.device, DTYPES[bench.work.dtype], bench.work.probe)


# --- Steps --------------------------------------------------------------------------------------------------------


def time_in_turns(bench: Bench, made: dict[str, Twin]) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each policy's steps, and the bytes that one step with offload moves to the host."""
    seconds: dict[str, list[float]] = {policy: [] for policy in made}
    before = made[OFFLOAD].moved_bytes if OFFLOAD in made else 0
    for turn in range(bench.work.rounds):
        for policy, twin in made.items():
            bench.show(f"time of {policy}, round {turn + 1} of {bench.work.rounds}")
            seconds[policy].append(seconds_of(bench, twin.step))
    moved = made[OFFLOAD].moved_bytes - before if OFFLOAD in made else 0
    return seconds, moved // bench.work.rounds


def _time_row(policy: str, seconds: list[float], plain: list[float]) -> Row:
    low, median, high = quartiles(seconds)
    return Row(
        name=f"step, {policy}",
        verdict=None,
        summary=f"{median * 1e3:.4g} ms, {median / statistics.median(plain):.3g} of the plain step",
        figures={"seconds": median, "lower_quartile": low, "upper_quartile": high, "steps": len(seconds)},
    )


def quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, median, high


def _hidden_row(bench: Bench, seconds: dict[str, list[float]], moved: int, rates: Measured) -> Row:
    added = statistics.median(seconds[OFFLOAD]) - statistics.median(seconds[RECOMPUTE])
    copies = moved / rates.link_to_host + moved / rates.link
    kernels = statistics.median(seconds[RECOMPUTE])
    hidden = 1 - min(1.0, max(0.0, added / copies)) if copies else 0.0
    low, _, high = quartiles([a - b for a, b in zip(seconds[OFFLOAD], seconds[RECOMPUTE], strict=True)])
    noise = 0.0 if bench.is_emulated else (high - low) / copies if copies else 1.0
    verdict, summary = _judge_hidden(hidden, noise, copies, kernels)
    return Row(
        name="copies hidden",
        verdict=verdict,
        summary=summary,
        figures={"share": hidden, "copy_seconds": copies, "added_seconds": added, "moved_bytes": moved, "noise": noise},
    )


def _judge_hidden(hidden: float, noise: float, copies: float, kernels: float) -> tuple[Verdict, str]:
    if not copies:
        return Verdict.FAIL, "offload moved nothing"
    said = f"{hidden:.0%} of {copies * 1e3:.3g} ms of copies"
    if hidden >= THRESHOLDS.hidden:
        return Verdict.PASS, said
    if copies > kernels:
        return Verdict.INCONCLUSIVE, f"{said}: the copies take longer than the kernels, which cannot hide them"
    if noise > 1 - THRESHOLDS.hidden:
        return Verdict.INCONCLUSIVE, f"{said}: the copies take less time than steps differ by"
    return Verdict.FAIL, f"{said}, at least {THRESHOLDS.hidden:.0%} expected"


# --- Links and disk -----------------------------------------------------------------------------------------------


def _link_rows(bench: Bench, rates: Measured) -> list[Row]:
    if bench.device.type == "cpu":
        return []
    both = {"link, host to device": rates.link, "link, device to host": rates.link_to_host}
    return [_link_row(bench, name, rate) for name, rate in both.items()]


def _link_row(bench: Bench, name: str, rate: float) -> Row:
    figures: dict[str, Any] = {"bytes_per_second": rate}
    if bench.sheet is None:
        return Row(
            name=name,
            verdict=None,
            summary=f"{rate / 1e9:.3g} GB/s ({bench.why_no_sheet.split(':')[0]})",
            figures=figures,
        )
    share = rate / bench.sheet.link
    verdict = Verdict.PASS if share >= THRESHOLDS.link else Verdict.FAIL
    expected = "" if verdict is Verdict.PASS else f", at least {THRESHOLDS.link:.0%} expected: see `lowtide doctor`"
    return Row(
        name=name,
        verdict=verdict,
        summary=f"{rate / 1e9:.3g} GB/s, {share:.0%} of the data sheet's{expected}",
        figures={**figures, "share_of_data_sheet": share},
    )


def _disk_row(bench: Bench) -> Row:
    """Write a file in the temporary directory to the disk, and read it without the page cache."""
    path, block = bench.folder / "rate", os.urandom(2**20)
    count = bench.work.disk_bytes // len(block)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter() - began
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.read(len(block)):
            pass
        read = time.perf_counter() - began
    path.unlink()
    write_rate, read_rate = bench.work.disk_bytes / written, bench.work.disk_bytes / read
    return Row(
        name="disk of temporary files",
        verdict=None,
        summary=f"writes {write_rate / 1e9:.3g} GB/s, reads {read_rate / 1e9:.3g} GB/s",
        figures={"write_bytes_per_second": write_rate, "read_bytes_per_second": read_rate},
    )


# --- The profiler's trace -----------------------------------------------------------------------------------------


def _trace(bench: Bench, twin: Twin) -> list[Row]:
    bench.show("a trace of recompute+offload")

    def step() -> None:
        twin.step()
        torch.accelerator.synchronize(bench.device)

    events = profiled(bench.folder, [ProfilerActivity.CPU, ProfilerActivity.CUDA], step)
    return [traced_row(events)]


def traced_row(events: list[dict[str, Any]]) -> Row:
    """Judge from a trace whether copies ran on side streams while kernels ran."""
    kernels = [event for event in events if event.get("cat") == "kernel" and event.get("ph") == "X"]
    copies = [event for event in events if _is_over_the_link(event)]
    busy: dict[Any, float] = {}
    for event in kernels:
        busy[_stream(event)] = busy.get(_stream(event), 0.0) + event["dur"]
    compute = max(busy, key=lambda stream: busy[stream], default=None)
    aside = [event for event in copies if _stream(event) != compute]
    total = sum(event["dur"] for event in copies)
    hidden = _overlap(_merged(aside), _merged(kernels)) / total if total else 0.0
    figures = {"copies": len(copies), "on_side_streams": len(aside), "share": hidden, "copy_seconds": total / 1e6}
    if not copies or not kernels:
        said = "the trace shows no copies from or to pinned memory" if kernels else "the trace shows no kernels"
        return Row(name="copies in a trace", verdict=Verdict.INCONCLUSIVE, summary=said, figures=figures)
    enough = hidden >= THRESHOLDS.hidden and bool(aside)
    return Row(
        name="copies in a trace",
        verdict=Verdict.PASS if enough else Verdict.FAIL,
        summary=f"{len(aside)} of {len(copies)} copies on side streams, {hidden:.0%} of their time beside kernels",
        figures=figures,
    )


def _is_over_the_link(event: dict[str, Any]) -> bool:
    name = event.get("name", "")
    return event.get("cat") == "gpu_memcpy" and event.get("ph") == "X" and "Pinned" in name


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream")


def _merged(events: list[dict[str, Any]]) -> Spans:
    merged: Spans = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _overlap(some: Spans, others: Spans) -> float:
    """Return how long both run, of merged spans."""
    total, place = 0.0, 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        index = place
        while index < len(others) and others[index][0] < end:
            total += min(end, others[index][1]) - max(begin, others[index][0])
            index += 1
    return total
