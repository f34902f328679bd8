"""Is memory freed, and what was moved away really away?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.auditing.report import CheckResult, Verdict
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.auditing.case import Case

_NOTICEABLE = 0.02
_MOST = 0.5
_EXPECTED, _LEAST = 0.75, 0.25
"""Shares of the inputs. Below the second, inputs died that nobody needed; between the two, something outside of the
blocks may need them as well, and autograd saves them there."""
_FEWEST_BLOCKS = 3
"""With fewer, prefetching one block ahead looks like holding all."""


def memory(case: Case) -> CheckResult:
    before, after = case.plain.total_held, case.run().total_held
    evidence: dict[str, Any] = {"plain_bytes": before, "bytes": after, "by_block": _by_block(case)}
    if before == 0:
        return case.check("memory", Verdict.INCONCLUSIVE, "the plain model holds nothing after forward", **evidence)
    saved = 1 - after / before
    what = f"{format_bytes(before)} held after forward, {format_bytes(after)} with it"
    if saved < _NOTICEABLE and case.repeats_the_reference:
        return case.recomputes_too("memory", **evidence)
    if saved < _NOTICEABLE:
        return case.check(
            "memory",
            Verdict.FAIL,
            f"{what}: it saves nothing",
            remedy="the setting does not reach the blocks, or something else keeps their activations: hidden states "
            "that are returned, a cache, a hook",
            **evidence,
        )
    return case.check("memory", Verdict.PASS, f"{what} ({100 * saved:.0f} % less)", **evidence)


def offload(case: Case) -> CheckResult:
    """Inputs of recomputed blocks: gone from the device after forward, and not all back at once in backward."""
    expected, moved = _boundary_bytes(case)
    evidence: dict[str, Any] = {"expected_bytes": expected, "moved_bytes": moved}
    if moved < _LEAST * expected or moved == 0:
        return _nothing_moved(case, evidence)
    restored = sum(1 for name in case.run().inputs if name in case.recomputed)
    evidence |= {"blocks": restored, "most_blocks_restored_at_once": case.run().most_restored_alive}
    if restored > _FEWEST_BLOCKS and case.run().most_restored_alive > max(2, _MOST * restored):
        return case.check(
            "offload",
            Verdict.FAIL,
            f"inputs of {case.run().most_restored_alive} of {restored} blocks are back on the device at once: what "
            "forward freed, backward holds again",
            remedy="restored tensors must not be cached: drop them when their block's backward is done",
            **evidence,
        )
    what = f"{format_bytes(moved)} of {format_bytes(expected)} of the blocks' inputs left the device"
    if moved < _EXPECTED * expected:
        return case.check(
            "offload",
            Verdict.INCONCLUSIVE,
            f"only {what}",
            remedy="keyword inputs and tensors in containers are missed by hooks on positional ones: lowtide.apply "
            "takes all of them",
            **evidence,
        )
    return case.check("offload", Verdict.PASS, what, **evidence)


def _nothing_moved(case: Case, evidence: dict[str, Any]) -> CheckResult:
    if case.expects_offload:
        return case.check(
            "offload",
            Verdict.FAIL,
            f"{format_bytes(evidence['moved_bytes'])} of {format_bytes(evidence['expected_bytes'])} left the device",
            remedy="an offload patch on torch's CheckpointFunction is never called by use_reentrant=False; hooks see "
            "positional inputs only: lowtide.apply(model, 'recompute+offload')",
            **evidence,
        )
    return case.check("offload", Verdict.NOT_APPLICABLE, "the blocks' inputs stay where they are", **evidence)


def _boundary_bytes(case: Case) -> tuple[int, int]:
    """Bytes of the recomputed blocks' inputs; and those of them that are no longer in memory after forward.

    Without the block that ran last: backward begins with it, so that a good engine keeps its input.
    """
    blocks = [pairs for name, pairs in case.run().inputs.items() if name in case.recomputed]
    inputs = [pair for pairs in blocks[:-1] for pair in pairs]
    return sum(size for size, _ in inputs), sum(size for size, is_alive in inputs if not is_alive)


def _by_block(case: Case) -> dict[str, list[int]]:
    """Bytes without and with the set-up."""
    names = sorted(set(case.plain.held_bytes) | set(case.run().held_bytes))
    return {name or "outside of blocks": [case.plain.held_bytes[name], case.run().held_bytes[name]] for name in names}
