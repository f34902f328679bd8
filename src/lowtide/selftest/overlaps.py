"""The stage `overlaps`: do copies run beside kernels, and how fast are the links?

Steps are timed in turns: one of each policy, then the next round, so that a device that grows warm slows all of them.
Copies that are not hidden make a step longer: the share that is hidden is what offload's copies would take by
themselves, at the rate of the link as measured, less what they add to a step with recompute alone. A trace of the
device also shows it, and on which streams the copies ran.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from lowtide.auditing.grades import Grade
from lowtide.auditing.result import Verdict
from lowtide.hardware import calibration
from lowtide.selftest.findings import Findings
from lowtide.selftest.meters import device_events, seconds_of
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
    "recompute+tile(mlp, loss, tokens={tile}, loss_tokens={tile})",
    "recompute+tile(tokens={tile}, loss_tokens={tile})",
)

TRACED = ("cuda", "sim")
"""The types of device that can be traced."""

HIDDEN, TRACE = "copies hidden", "copies in a trace"
_TOO_LONG = "the copies take longer than the kernels, which cannot hide them"

Span = tuple[float, float]
"""Times of begin and end."""


def run(bench: Bench) -> StageResult:
    """Time steps, links and disk, and judge how much of the copies' time is hidden."""
    found = Findings(bench=bench)
    bench.show("links and kernels")
    rates = found.attempt("rates", measure_rates, bench)
    found.attempt("steps", _time_steps, bench, found, rates)
    if rates is not None:
        found.rows += _link_rows(bench, rates)
    bench.show("disk")
    found.add("disk of temporary files", _disk_row, bench, grade=Grade.UNTIDY)
    if bench.has_streams:
        return found.stage("overlaps")
    return found.stage(
        "overlaps", why=f"a device of type {bench.device.type} has no copies that could overlap with kernels"
    )


def _time_steps(bench: Bench, found: Findings, rates: Measured | None) -> None:
    with twins(bench, bench.tiled(POLICIES), found) as made:
        seconds, moved = time_in_turns(bench, made, found)
        if OFFLOAD in made and bench.device.type in TRACED:
            found.add(TRACE, _trace_row, bench, made[OFFLOAD])
    found.rows += [_time_row(policy, steps, seconds.get(PLAIN)) for policy, steps in seconds.items()]
    if not bench.has_streams:
        return
    if rates is None or not {RECOMPUTE, OFFLOAD} <= seconds.keys():
        found.unproven(HIDDEN, "steps with and without offload, or the link's rate, could not be measured")
    else:
        found.rows.append(_hidden_row(bench, seconds, moved, rates))


def measure_rates(bench: Bench) -> Measured:
    """Time kernels and copies as `lowtide calibrate` does, in numbers as wide as the workload's."""
    return calibration.measure(bench.device, DTYPES[bench.work.dtype], bench.work.probe)


# --- Steps --------------------------------------------------------------------------------------------------------


def time_in_turns(bench: Bench, made: dict[str, Twin], found: Findings) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each policy's steps, and the bytes that one step with offload moves to the host.

    A policy whose step raises is missing. If time is up, there are fewer rounds, but one.
    """
    seconds: dict[str, list[float]] = {policy: [] for policy in made}
    before = made[OFFLOAD].moved_bytes if OFFLOAD in made else 0
    for turn in range(bench.work.rounds):
        if turn and bench.limits.reached:
            break
        for policy in list(seconds):
            bench.show(f"time of {policy}, round {turn + 1} of {bench.work.rounds}")
            taken = made[policy].measured(found, f"step, {policy}", seconds_of, bench, made[policy].step)
            if taken is None:
                del seconds[policy]
            else:
                seconds[policy].append(taken)
    moved = made[OFFLOAD].moved_bytes - before if OFFLOAD in seconds else 0
    return seconds, moved // max(1, len(seconds.get(OFFLOAD, [])))


def _time_row(policy: str, seconds: list[float], plain: list[float] | None) -> Row:
    low, median, high = quartiles(seconds)
    beside = f", {median / statistics.median(plain):.3g} of the plain step" if plain else ""
    return Row(
        name=f"step, {policy}",
        verdict=None,
        summary=f"{median * 1e3:.4g} ms{beside}",
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
    low, _, high = quartiles([a - b for a, b in zip(seconds[OFFLOAD], seconds[RECOMPUTE], strict=False)])
    noise = 0.0 if bench.is_emulated else (high - low) / copies if copies else 1.0
    verdict, summary = _judge_hidden(hidden, noise, copies, kernels)
    return Row(
        name=HIDDEN,
        verdict=verdict,
        grade=Grade.NO_EFFECT,
        summary=summary,
        figures={"share": hidden, "copy_seconds": copies, "added_seconds": added, "moved_bytes": moved, "noise": noise},
    )


def _judge_hidden(hidden: float, noise: float, copies: float, kernels: float) -> tuple[Verdict, str]:
    if not copies:
        return Verdict.FAIL, "offload moved nothing"
    said = f"{hidden:.0%} of {copies * 1e3:.3g} ms of copies"
    if noise > 1 - THRESHOLDS.hidden:
        return Verdict.INCONCLUSIVE, f"{said}: the copies take less time than steps differ by"
    if hidden >= THRESHOLDS.hidden:
        return Verdict.PASS, said
    if copies > kernels:
        return Verdict.INCONCLUSIVE, f"{said}: {_TOO_LONG}"
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
        grade=Grade.UNTIDY,
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


# --- A trace of the device ----------------------------------------------------------------------------------------


def _trace_row(bench: Bench, twin: Twin) -> Row:
    bench.show("a trace of recompute+offload")
    return traced_row(device_events(bench, twin.step))


def traced_row(events: list[dict[str, Any]]) -> Row:
    """Judge from a trace whether copies ran on side streams while kernels ran."""
    kernels = [event for event in events if event.get("cat") == "kernel" and event.get("ph") == "X"]
    copies = [event for event in events if _is_over_the_link(event)]
    busy: dict[Any, float] = {}
    for event in kernels:
        busy[_stream(event)] = busy.get(_stream(event), 0.0) + event["dur"]
    compute = max(busy, key=lambda stream: busy[stream], default=None)
    aside = [event for event in copies if _stream(event) != compute]
    computing = _merged(kernels)
    total = sum(event["dur"] for event in copies)
    hidden = sum(_overlap(_span(event), computing) for event in aside) / total if total else 0.0
    figures = {"copies": len(copies), "on_side_streams": len(aside), "share": hidden, "copy_seconds": total / 1e6}
    could_hide = sum(event["dur"] for event in aside)
    verdict, said = _judge_trace(hidden, could_hide, total, sum(end - begin for begin, end in computing))
    where = f"{len(aside)} of {len(copies)} copies on side streams, "
    return Row(
        name=TRACE, verdict=verdict, grade=Grade.NO_EFFECT, summary=f"{where if total else ''}{said}", figures=figures
    )


def _judge_trace(hidden: float, aside: float, copies: float, kernels: float) -> tuple[Verdict, str]:
    if not copies or not kernels:
        return Verdict.INCONCLUSIVE, f"the trace shows no {'copies from or to pinned memory' if kernels else 'kernels'}"
    said = f"{hidden:.0%} of their time beside kernels"
    if hidden >= THRESHOLDS.hidden:
        return Verdict.PASS, said
    if aside > kernels:
        return Verdict.INCONCLUSIVE, f"{said}: {_TOO_LONG}"
    return Verdict.FAIL, f"{said}, at least {THRESHOLDS.hidden:.0%} expected"


def _is_over_the_link(event: dict[str, Any]) -> bool:
    name = event.get("name", "")
    return event.get("cat") == "gpu_memcpy" and event.get("ph") == "X" and "Pinned" in name


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream")


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _merged(events: list[dict[str, Any]]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(map(_span, events)):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _overlap(one: Span, others: list[Span]) -> float:
    """Return how long one span and any of the others, which are merged, run at the same time."""
    return sum(max(0.0, min(one[1], end) - max(one[0], begin)) for begin, end in others)
