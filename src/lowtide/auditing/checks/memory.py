"""Is memory freed after forward, and did what was offloaded really leave the device?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.auditing.result import CheckResult, Verdict
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.auditing.case import Case

_NOTICEABLE = 0.02
"""The least share of the memory that counts as saved."""
_EXPECTED, _LEAST = 0.75, 0.25
"""Shares of the inputs that left the device. Below the second, only inputs died that nobody needed; between the two,
something outside of the blocks may need them as well, and autograd saves them there."""
_MOST_RESTORED = 0.5
"""The largest share of the blocks whose inputs may be back on the device at once."""
_FEWEST_BLOCKS = 3
"""With no more than these, prefetching one block ahead looks like holding all."""


def memory(case: Case) -> CheckResult:
    """Check that fewer bytes are alive after forward than in the plain model."""
    before, after = case.plain.total_held, case.run().total_held
    evidence: dict[str, Any] = {"plain_bytes": before, "bytes": after, "by_block": _by_block(case)}
    if before == 0:
        return case.result("memory", Verdict.INCONCLUSIVE, "the plain model holds nothing after forward", **evidence)
    saved = 1 - after / before
    what = f"{format_bytes(before)} held after forward, {format_bytes(after)} with this set-up"
    if saved < _NOTICEABLE and case.recomputes_no_more_than_reference:
        return case.without_plain_reference("memory", **evidence)
    if saved < _NOTICEABLE:
        return case.result(
            "memory",
            Verdict.FAIL,
            f"{what}: it saves no memory",
            remedy="the setting does not reach the blocks, or something else keeps their activations alive: returned "
            "hidden states, a cache, a hook",
            **evidence,
        )
    return case.result("memory", Verdict.PASS, f"{what} ({100 * saved:.0f} % less)", **evidence)


def offload(case: Case) -> CheckResult:
    """Check that recomputed blocks' inputs leave the device after forward, and are not all back at once in backward."""
    expected, moved = _boundary_bytes(case)
    evidence: dict[str, Any] = {"expected_bytes": expected, "moved_bytes": moved}
    if moved < _LEAST * expected or moved == 0:
        return _nothing_moved(case, evidence)
    restored = sum(1 for name in case.run().inputs if name in case.recomputed)
    most = case.run().most_restored_alive
    evidence |= {"blocks": restored, "most_blocks_restored_at_once": most}
    if restored > _FEWEST_BLOCKS and most > max(2, _MOST_RESTORED * restored):
        return case.result(
            "offload",
            Verdict.FAIL,
            f"the inputs of {most} of {restored} blocks are back on the device at once: backward holds again what "
            "forward freed",
            remedy="do not cache restored tensors: drop them when their block's backward is done",
            **evidence,
        )
    what = f"{format_bytes(moved)} of {format_bytes(expected)} of the blocks' inputs left the device"
    if moved < _EXPECTED * expected:
        return case.result(
            "offload",
            Verdict.INCONCLUSIVE,
            f"only {what}",
            remedy="hooks on positional inputs miss keyword inputs and tensors in containers: lowtide.apply moves all "
            "of them",
            **evidence,
        )
    return case.result("offload", Verdict.PASS, what, **evidence)


def _nothing_moved(case: Case, evidence: dict[str, Any]) -> CheckResult:
    if case.expects_offload:
        moved, expected = format_bytes(evidence["moved_bytes"]), format_bytes(evidence["expected_bytes"])
        return case.result(
            "offload",
            Verdict.FAIL,
            f"only {moved} of {expected} of the blocks' inputs left the device",
            remedy="an offload patch on torch's CheckpointFunction is never called with use_reentrant=False, and hooks "
            "see positional inputs only: use lowtide.apply(model, 'recompute+offload')",
            **evidence,
        )
    return case.result("offload", Verdict.NOT_APPLICABLE, "the blocks' inputs stay where they are", **evidence)


def _boundary_bytes(case: Case) -> tuple[int, int]:
    """Return the bytes of the recomputed blocks' inputs, and how many of them are no longer in memory after forward.

    The block that ran last is left out: backward begins with it, so a good engine keeps its input.
    """
    blocks = [pairs for name, pairs in case.run().inputs.items() if name in case.recomputed]
    inputs = [pair for pairs in blocks[:-1] for pair in pairs]
    return sum(size for size, _ in inputs), sum(size for size, is_alive in inputs if not is_alive)


def _by_block(case: Case) -> dict[str, list[int]]:
    """Return the bytes that each block held without and with the set-up."""
    names = sorted(set(case.plain.held_bytes) | set(case.run().held_bytes))
    return {name or "outside of blocks": [case.plain.held_bytes[name], case.run().held_bytes[name]] for name in names}
