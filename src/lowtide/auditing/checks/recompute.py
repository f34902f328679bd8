"""Are the blocks run again in backward: all of them, once for each call?

Selective checkpointing runs a block again without some of its operators, whose outputs it keeps: mostly attention. That
is as right as the rest; the summary says how many calls of attention did not run again.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from lowtide.auditing.instruments import is_attention
from lowtide.auditing.result import CheckResult, Verdict, first_few
from lowtide.modules import ancestors

if TYPE_CHECKING:
    from lowtide.auditing.case import Case
    from lowtide.auditing.stacks import Stack

_NAME = "recomputed"

_NEGLIGIBLE = 0.1
"""A stack that is not recomputed and holds less than this share of the memory is mentioned, not failed."""


def recomputed(case: Case) -> CheckResult:
    """Check that every stack that matters runs again in backward, and no block more often than it was called."""
    stacks = [summary for stack in case.experiment.stacks if (summary := _stack_summary(case, stack)) is not None]
    missed = [stack for stack in stacks if stack["not_recomputed"] and stack["share_of_memory"] >= _NEGLIGIBLE]
    repeated = _run_too_often(case)
    if not stacks and not case.recomputes_no_more_than_reference:
        return case.result(
            _NAME,
            Verdict.NOT_APPLICABLE,
            "no stack of blocks ran with gradients",
            remedy="judge by the memory check",
        )
    if not any(stack["recomputed"] for stack in stacks):
        return _none_recomputed(case, stacks)
    if missed or repeated:
        findings = [_missed(stack) for stack in missed]
        findings += [f"{name} ran again {again} times for {calls} calls" for name, (again, calls) in repeated]
        return case.result(
            _NAME,
            Verdict.FAIL,
            "; ".join(findings),
            remedy="checkpoint these layers too, in the model's own code, or use lowtide.apply, which finds them",
            missed=[stack["name"] for stack in missed],
            count=sum(stack["not_recomputed"] for stack in missed) + len(repeated),
            stacks=stacks,
            repeated={name: list(counts) for name, counts in repeated},
        )
    blocks = sum(stack["recomputed"] for stack in stacks)
    names = ", ".join(f"{stack['name']} x{stack['recomputed']}" for stack in stacks)
    counts = _operator_counts(case)
    calls, again = counts["attention"]
    kept = f"; {calls - again} of their {calls} calls of attention were kept and ran once" if again < calls else ""
    return case.result(
        _NAME, Verdict.PASS, f"{blocks} blocks ran again in backward: {names}{kept}", stacks=stacks, operators=counts
    )


def _operator_counts(case: Case) -> dict[str, list[int]]:
    """Count how often the recomputed blocks called attention and other operators in forward, and how often again.

    What the plain model's backward calls as well is no recompute. Other operators are fewer again: the last ones of a
    block save nothing that backward needs.
    """
    counts = {"attention": [0, 0], "other": [0, 0]}
    in_blocks: collections.Counter[str] = collections.Counter()
    for (block, operator), calls in case.run().forward_operators.items():
        in_blocks[operator] += calls * (block in case.recomputed)
    again = case.run().backward_operators - case.plain.backward_operators
    for operator, calls in in_blocks.items():
        pair = counts["attention" if is_attention(operator) else "other"]
        pair[0] += calls
        pair[1] += again[operator]
    return counts


def _none_recomputed(case: Case, stacks: list[dict[str, Any]]) -> CheckResult:
    if case.run().total_held < 0.8 * case.plain.total_held:
        return case.result(
            _NAME,
            Verdict.NOT_APPLICABLE,
            "no block runs again in backward; the set-up saves memory in another way",
            stacks=stacks,
        )
    if case.recomputes_no_more_than_reference:
        return case.without_plain_reference(_NAME, stacks=stacks)
    return case.result(
        _NAME,
        Verdict.FAIL,
        "no block ran again in backward: the setting has no effect",
        remedy="check that the model's code reads the flag; lowtide.apply needs no support in it",
        missed=[stack["name"] for stack in stacks],
        count=sum(stack["not_recomputed"] for stack in stacks),
        stacks=stacks,
    )


def _stack_summary(case: Case, stack: Stack) -> dict[str, Any] | None:
    """Say what happened to a stack.

    None if it did not run, lies in a recomputed block, contains recomputed modules, or is recomputed by the reference,
    too.
    """
    again, by_itself = case.recomputed, case.plain.backward_calls
    around = {ancestor for name in again for ancestor in ancestors(name)}
    blocks = [name for name in stack.blocks if case.plain.forward_calls[name] and _is_trained(case, name)]
    if len(blocks) == 0 or any(ancestor in again for ancestor in ancestors(blocks[0])):
        return None
    done = [name for name in blocks if name in again]
    missed = [name for name in blocks if name not in again and name not in around and not by_itself[name]]
    if not done and not missed:
        return None
    held = sum(case.plain.held_bytes[name] for name in missed)
    return {
        "name": stack.name,
        "kind": stack.kind,
        "recomputed": len(done),
        "not_recomputed": len(missed),
        "blocks_not_recomputed": first_few(missed),
        "share_of_memory": round(held / max(1, case.plain.total_held), 4),
    }


def _is_trained(case: Case, block: str) -> bool:
    prefix = f"{block}."
    return any(gradient is not None for name, gradient in case.plain.gradients.items() if name.startswith(prefix))


def _run_too_often(case: Case) -> list[tuple[str, tuple[int, int]]]:
    """Return the blocks that ran more often in backward than they were called in forward, with both counts."""
    found = []
    for name in case.blocks:
        extra = case.run().backward_calls[name] - case.plain.backward_calls[name]
        if extra > case.run().forward_calls[name] > 0:
            found.append((name, (extra, case.run().forward_calls[name])))
    return found


def _missed(stack: dict[str, Any]) -> str:
    share = f"{100 * stack['share_of_memory']:.0f} % of the memory held"
    blocks = f"{stack['not_recomputed'] + stack['recomputed']} {stack['kind']}"
    if not stack["recomputed"]:
        return f"{stack['name']}: none of {blocks} ran again ({share})"
    names = stack["blocks_not_recomputed"]
    more = stack["not_recomputed"] - len(names)
    few = f"{', '.join(names)}{f' and {more} more' if more else ''}"
    return f"{stack['name']}: {few} of {blocks} did not run again ({share})"
