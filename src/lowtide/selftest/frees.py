"""The stage `frees`: are the bytes gone that a policy should free, by the allocator's own count?

What should be left after forward follows from the plain model: `lowtide.trace` tells what each of its regions saves,
and a policy leaves the outputs of regions instead, which are the next regions' inputs; with offload, the last two of
them. The peak may be higher by what the plain model's peak is above its bytes after forward, or by one region that is
recomputed. After a step, nothing may be left.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import lowtide
from lowtide.auditing.grades import Grade
from lowtide.auditing.result import Verdict
from lowtide.selftest.findings import Findings
from lowtide.selftest.meters import NO_PEAKS, step_memory
from lowtide.selftest.record import Row, StageResult
from lowtide.selftest.steps import PLAIN, twins
from lowtide.selftest.thresholds import THRESHOLDS
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.selftest.bench import Bench
    from lowtide.selftest.meters import StepMemory
    from lowtide.selftest.steps import Twin

POLICIES = (
    PLAIN,
    "recompute",
    "recompute(keep=attention)",
    "recompute+offload",
    "recompute+tile(mlp, loss, tokens={tile}, loss_tokens={tile})",
    "recompute+tile(tokens={tile}, loss_tokens={tile})",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """The most that a policy should leave on the device."""

    after_forward: int
    peak: int


def run(bench: Bench) -> StageResult:
    """Measure a step under each policy, and compare its bytes with what the plain model lets expect."""
    if not bench.counts_peaks:
        return StageResult(name="frees", why=NO_PEAKS)
    found = Findings(bench=bench)
    found.attempt("steps", _measure, bench, found)
    return found.stage("frees")


def _measure(bench: Bench, found: Findings) -> None:
    with twins(bench, bench.tiled(POLICIES), found) as made:
        seen = {}
        for policy, twin in made.items():
            bench.show(f"memory of {policy}")
            memory = twin.measured(found, policy, step_memory, bench, twin.forward, twin.finish)
            if memory is not None:
                seen[policy] = memory
        plain = seen.pop(PLAIN, None)
        saved = made[PLAIN].measured(found, "what regions save", _saved_by_region, made[PLAIN]) if plain else None
    if plain is None or saved is None:
        for policy in seen:
            found.unproven(policy, "there is no plain step to compare it with")
        return
    found.rows.append(_plain_row(plain))
    found.rows += [_row(policy, memory, expect(bench, policy, plain, saved), plain) for policy, memory in seen.items()]


def _saved_by_region(plain: Twin) -> list[int]:
    with lowtide.trace(plain.model) as seen:
        plain.step()
    return [seen.saved.get(name, 0) for name in seen.regions]


def expect(bench: Bench, policy: str, plain: StepMemory, saved: list[int]) -> Expected:
    """Return the most bytes that a policy should leave after forward and at the peak."""
    work = bench.work
    output = work.tokens * work.hidden * work.width
    left = 2 * output if "offload" in policy else len(saved) * output
    if "keep=attention" in policy:  # each region's output of attention, and a float32 number for each head and token
        left += len(saved) * (output + 4 * work.tokens * work.heads)
    after_forward = plain.after_forward - sum(saved) + left
    if "offload" in policy:
        after_forward -= output  # the first region's input, which comes from outside the regions
    return Expected(
        after_forward=after_forward, peak=after_forward + max(plain.peak - plain.after_forward, 2 * max(saved))
    )


def _row(policy: str, seen: StepMemory, expected: Expected, plain: StepMemory) -> Row:
    allowed = 1 + THRESHOLDS.freed
    reasons = [
        f"{format_bytes(found)} {where}, at most {format_bytes(most)} expected"
        for where, found, most in (
            ("after forward", seen.after_forward, expected.after_forward),
            ("at the peak", seen.peak, expected.peak),
        )
        if found > most * allowed
    ]
    reasons += _left_over(seen)
    freed = f"{format_bytes(seen.after_forward)} after forward instead of {format_bytes(plain.after_forward)}"
    return Row(
        name=policy,
        verdict=Verdict.FAIL if reasons else Verdict.PASS,
        grade=Grade.NO_EFFECT,
        summary="; ".join(reasons) or freed,
        figures={
            "after_forward_bytes": seen.after_forward,
            "expected_after_forward_bytes": expected.after_forward,
            "peak_bytes": seen.peak,
            "expected_peak_bytes": expected.peak,
            "leftover_bytes": seen.leftover,
        },
    )


def _plain_row(seen: StepMemory) -> Row:
    reasons = _left_over(seen)
    return Row(
        name=PLAIN,
        verdict=Verdict.INCONCLUSIVE if reasons else None,
        summary="; ".join(reasons) or f"{format_bytes(seen.after_forward)} after forward",
        figures={
            "after_forward_bytes": seen.after_forward,
            "peak_bytes": seen.peak,
            "leftover_bytes": seen.leftover,
        },
    )


def _left_over(seen: StepMemory) -> list[str]:
    if seen.leftover <= THRESHOLDS.leftover_bytes:
        return []
    return [f"{format_bytes(seen.leftover)} are left after the step"]
