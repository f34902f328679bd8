"""The stage `plans`: are planned peaks and step times those of real steps?

Each policy is planned before and after calibration, with every layer simulated, and then run. Peaks must agree; of the
times, their order is judged, and the error of each is recorded. A device that is not in the table of accelerators is
planned with the rates that were measured.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from typing import TYPE_CHECKING, Any

import torch

from lowtide.auditing.grades import Grade
from lowtide.auditing.result import Verdict
from lowtide.hardware.accelerators import Accelerator
from lowtide.selftest.findings import Findings
from lowtide.selftest.meters import NO_PEAKS, step_memory
from lowtide.selftest.models import workload_config
from lowtide.selftest.overlaps import measure_rates, time_in_turns
from lowtide.selftest.record import Row, StageResult
from lowtide.selftest.steps import PLAIN, twins
from lowtide.selftest.thresholds import THRESHOLDS
from lowtide.simulation.process import SimulatorProcess
from lowtide.targets.job import Job
from lowtide.targets.target import find_target
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.hardware.calibration import Measured
    from lowtide.selftest.bench import Bench
    from lowtide.simulation.estimate import Estimate

POLICIES = (
    PLAIN,
    "recompute",
    "recompute+offload",
    "recompute(keep=attention)",
    "recompute+tile(mlp, loss, tokens={tile}, loss_tokens={tile})",
    "recompute+tile(tokens={tile}, loss_tokens={tile})",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was planned for a policy, and what was measured."""

    policy: str
    planned_peak: int
    peak: int
    planned_seconds: float
    """After calibration."""
    seconds: float
    seconds_before_calibration: float | None
    """As planned from the data sheet; None if the device has none."""

    @property
    def peak_error(self) -> float:
        return self.planned_peak / self.peak - 1

    @property
    def seconds_error(self) -> float:
        return self.planned_seconds / self.seconds - 1

    @property
    def seconds_error_before_calibration(self) -> float | None:
        before = self.seconds_before_calibration
        return None if before is None else before / self.seconds - 1


def run(bench: Bench) -> StageResult:
    """Plan six policies, run them, and compare."""
    if not bench.counts_peaks:
        return StageResult(name="plans", why=NO_PEAKS)
    found = Findings(bench=bench)
    bench.show("calibration")
    rates = found.attempt("calibration", measure_rates, bench)
    plans = found.attempt("plans", plan, bench, found, *sheets(bench, rates)) if rates else None
    if plans is None:
        return found.stage("plans")
    before, after = plans
    measured = found.attempt("steps", _measure, bench, found) or {}
    compared = [
        Comparison(
            policy=policy,
            planned_peak=after[policy].peak_bytes,
            peak=peak,
            planned_seconds=after[policy].seconds,
            seconds=seconds,
            seconds_before_calibration=before[policy].seconds if policy in before else None,
        )
        for policy, (peak, seconds) in measured.items()
        if policy in after
    ]
    found.rows += [*map(_row, compared), _order_row(compared)]
    return found.stage("plans")


def sheets(bench: Bench, rates: Measured) -> tuple[Accelerator | None, Accelerator]:
    """Return what to plan with before calibration (None for a device without a data sheet), and after it."""
    if bench.sheet is not None:
        return bench.sheet, dataclasses.replace(bench.sheet, efficiencies=rates.shares_of(bench.sheet))
    flops = max(rates.matmul, rates.attention, rates.attention_backward)
    measured = Accelerator(
        name=f"this {bench.device.type}",
        memory=2**40,
        half_flops=flops,
        single_flops=flops,
        bandwidth=rates.memory,
        link=rates.link,
        network=rates.link,
        has_flash=bench.has_flash,
        blas_workspace=0,  # cuBLAS' is on NVIDIA's devices, which have data sheets
    )
    return None, dataclasses.replace(measured, efficiencies=rates.shares_of(measured))


def plan(bench: Bench, found: Findings, *accelerators: Accelerator | None) -> list[dict[str, Estimate]]:
    """Simulate a step under each policy, with every layer, on each of the accelerators; on None, nothing."""
    target = find_target(workload_config(bench.work))
    kernel = "flash" if bench.is_emulated or bench.device.type == "cpu" else "auto"
    job = Job(tokens=bench.work.tokens, dtype=bench.work.dtype, attention=kernel)
    estimates: list[dict[str, Estimate]] = [{} for _ in accelerators]
    wanted = [(accelerator, made) for accelerator, made in zip(accelerators, estimates, strict=True) if accelerator]
    with SimulatorProcess(target, job, wanted[0][0]) as simulator:
        for accelerator, made in wanted:
            simulator.change_accelerator(accelerator)
            for policy in policies(bench):
                bench.show(f"planning {policy}")
                estimate = functools.partial(simulator.estimate, policy, exact=True)
                if planned := found.attempt(f"plan of {policy}", estimate, grade=Grade.UNTIDY):
                    made[policy] = planned
    return estimates


def policies(bench: Bench) -> list[str]:
    """Return the policies that are planned and run: without offload to the host where there is none."""
    return [policy for policy in bench.tiled(POLICIES) if bench.has_streams or "offload" not in policy]


def _measure(bench: Bench, found: Findings) -> dict[str, tuple[int, float]]:
    """Return the peak in bytes and the median seconds of a step under each policy."""
    measured = {}
    with twins(bench, policies(bench), found) as made:
        seconds, _ = time_in_turns(bench, made, found)
        for policy, steps in seconds.items():
            twin = made[policy]
            memory = twin.measured(found, policy, step_memory, bench, twin.forward, twin.finish)
            if memory is not None:
                measured[policy] = (_standing_bytes(twin) + memory.peak, statistics.median(steps))
    return measured


def _standing_bytes(twin: Any) -> int:
    """Return the bytes of weights, buffers, the optimizer's states and the batch, as the allocator rounds them."""
    states = [value for state in twin.optimizer.state.values() for value in state.values()]
    tensors = [*twin.model.parameters(), *twin.model.buffers(), *states, *twin.batch.values()]
    there = {
        id(t): t for t in tensors if isinstance(t, torch.Tensor) and t.device.type == twin.batch["labels"].device.type
    }
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in there.values())


def _row(compared: Comparison) -> Row:
    agrees = abs(compared.peak_error) <= THRESHOLDS.plan_peak
    before = compared.seconds_error_before_calibration
    uncalibrated = "" if before is None else f"; {before:+.0%} before calibration"
    said = (
        f"peak {format_bytes(compared.planned_peak)} planned, {format_bytes(compared.peak)} measured "
        f"({compared.peak_error:+.1%}); step {compared.planned_seconds * 1e3:.4g} ms planned, "
        f"{compared.seconds * 1e3:.4g} ms measured ({compared.seconds_error:+.0%}{uncalibrated})"
    )
    return Row(
        name=compared.policy,
        verdict=Verdict.PASS if agrees else Verdict.FAIL,
        grade=Grade.UNTIDY,
        summary=said if agrees else f"{said}: peaks must agree within {THRESHOLDS.plan_peak:.0%}",
        figures={
            "planned_peak_bytes": compared.planned_peak,
            "peak_bytes": compared.peak,
            "peak_error": compared.peak_error,
            "planned_seconds": compared.planned_seconds,
            "planned_seconds_before_calibration": compared.seconds_before_calibration,
            "seconds": compared.seconds,
            "seconds_error": compared.seconds_error,
            "seconds_error_before_calibration": before,
        },
    )


def _order_row(compared: list[Comparison]) -> Row:
    """Judge the order of those pairs of policies whose measured times differ enough."""
    pairs = [tuple(sorted(pair, key=lambda row: row.seconds)) for pair in itertools.combinations(compared, 2)]
    different = [(fast, slow) for fast, slow in pairs if slow.seconds > fast.seconds * (1 + THRESHOLDS.plan_order)]
    least = 1 - THRESHOLDS.plan_margin
    wrong = [
        f"{slow.policy} before {fast.policy}"
        for fast, slow in different
        if slow.planned_seconds < fast.planned_seconds * least
    ]
    if not different:
        verdict, said = Verdict.INCONCLUSIVE, "no two steps differ enough to be ordered"
    elif wrong:
        verdict, said = Verdict.FAIL, f"{len(wrong)} of {len(different)} pairs are planned the wrong way: {wrong[0]}"
    else:
        verdict, said = Verdict.PASS, f"{len(different)} pairs of steps are planned in the measured order"
    return Row(
        name="order of step times",
        verdict=verdict,
        grade=Grade.UNTIDY,
        summary=said,
        figures={"pairs": len(different), "wrong": wrong},
    )
