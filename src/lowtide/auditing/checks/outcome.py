"""Is the outcome the plain model's: outputs and losses (a router's too), buffers, random draws?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide.auditing.comparison import TOLERANCES, max_abs
from lowtide.auditing.result import CheckResult, Verdict, first_few

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.auditing.case import Case


def outputs(case: Case) -> CheckResult:
    """Check that the loss and all tensors that both runs return are the same."""
    plain, seen = case.plain.outputs, case.run().outputs
    wrong = [name for name, tensor in plain.items() if name in seen and not _close(tensor, seen[name])]
    if not _close(case.plain.loss, case.run().loss):
        wrong.insert(0, "the loss")
    absent = [name for name in plain if name not in seen]
    if wrong:
        return case.result(
            "outputs",
            Verdict.FAIL,
            f"these differ from the plain model's: {', '.join(first_few(wrong, 4))}",
            remedy="checkpointing must not change what forward computes: look at what the set-up replaces",
            different=first_few(wrong),
            loss=float(case.run().loss),
            expected_loss=float(case.plain.loss),
        )
    note = f"; not returned: {', '.join(first_few(absent, 4))}" if absent else ""
    return case.result(
        "outputs",
        Verdict.PASS,
        f"loss and {len(plain) - len(absent)} outputs are the same{note}",
        loss=float(case.run().loss),
        absent=first_few(absent),
    )


def buffers(case: Case) -> CheckResult:
    """Check that buffers are what one forward makes of them: a recompute must not update them again."""
    plain, seen = case.plain.buffers, case.run().buffers
    shared = sorted(plain.keys() & seen.keys())
    if not shared:
        return case.result("buffers", Verdict.NOT_APPLICABLE, "the model has no buffers")
    wrong = [name for name in shared if not _close(plain[name], seen[name])]
    if wrong:
        return case.result(
            "buffers",
            Verdict.FAIL,
            f"{len(wrong)} buffers differ from what one forward makes of them: {', '.join(first_few(wrong, 3))}",
            remedy="the recompute updates statistics a second time: leave these blocks out, or lower their momentum to "
            "1 - sqrt(1 - momentum), so that two updates amount to one",
            different=first_few(wrong),
            count=len(wrong),
        )
    return case.result("buffers", Verdict.PASS, f"{len(shared)} buffers as after one forward", count=len(shared))


def randomness(case: Case) -> CheckResult:
    """Check that every random number that a recompute draws is one that forward drew."""
    draws = case.run().backward_draws - case.plain.backward_draws  # a block with tiles inside may draw twice
    if not draws:
        return case.result(
            "random state",
            Verdict.NOT_APPLICABLE,
            "no recomputed block draws random numbers (dropout=0.1 makes them)",
        )
    other_draws = (case.run().forward_draws - case.plain.forward_draws).total()
    new = {draw: count for draw, count in draws.items() if draw not in case.run().forward_draws}
    if new:
        return case.result(
            "random state",
            Verdict.FAIL,
            f"{sum(new.values())} of {draws.total()} random draws in the recompute differ from forward's",
            remedy="pass preserve_rng_state=True (accelerate's FSDP2 wrapper passes False)",
            new=sum(new.values()),
            draws=draws.total(),
            other_draws_in_forward=other_draws,
        )
    return case.result(
        "random state",
        Verdict.PASS,
        f"{draws.total()} random draws of the recompute repeat those of forward",
        draws=draws.total(),
        other_draws_in_forward=other_draws,
    )


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    tolerance = TOLERANCES.get(one.dtype, 1e-4)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max_abs(one), equal_nan=True)
