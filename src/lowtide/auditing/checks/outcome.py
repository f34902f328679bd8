"""Does the forward compute the same: outputs, losses (a router's too), buffers, random draws?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide.auditing.comparison import TOLERANCES, size_of
from lowtide.auditing.report import CheckResult, Verdict, some

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.auditing.case import Case


def outputs(case: Case) -> CheckResult:
    plain, seen = case.plain.outputs, case.run().outputs
    wrong = [name for name, tensor in plain.items() if name in seen and not _close(tensor, seen[name])]
    if not _close(case.plain.loss, case.run().loss):
        wrong.insert(0, "the loss")
    absent = [name for name in plain if name not in seen]
    if wrong:
        return case.check(
            "outputs",
            Verdict.FAIL,
            f"differ: {', '.join(some(wrong, 4))}",
            remedy="checkpointing must not change what forward computes: look at what the set-up replaces",
            different=some(wrong),
            loss=float(case.run().loss),
            expected_loss=float(case.plain.loss),
        )
    note = f"; not returned: {', '.join(some(absent, 4))}" if absent else ""
    return case.check(
        "outputs",
        Verdict.PASS,
        f"loss and {len(plain) - len(absent)} outputs are the same{note}",
        loss=float(case.run().loss),
        absent=some(absent),
    )


def buffers(case: Case) -> CheckResult:
    plain, seen = case.plain.buffers, case.run().buffers
    shared = sorted(plain.keys() & seen.keys())
    if not shared:
        return case.check("buffers", Verdict.NOT_APPLICABLE, "the model has no buffers")
    wrong = [name for name in shared if not _close(plain[name], seen[name])]
    if wrong:
        return case.check(
            "buffers",
            Verdict.FAIL,
            f"{len(wrong)} buffers are not what one forward makes of them: {', '.join(some(wrong, 3))}",
            remedy="statistics are updated again by the recomputation: leave these blocks out, or lower their momentum "
            "to 1 - sqrt(1 - momentum), of which two updates are one",
            different=some(wrong),
            count=len(wrong),
        )
    return case.check("buffers", Verdict.PASS, f"{len(shared)} buffers as after one forward", count=len(shared))


def randomness(case: Case) -> CheckResult:
    """Every number that a recomputation draws must be one that forward drew."""
    draws = case.run().backward_draws - case.plain.backward_draws  # of one block perhaps twice: it has tiles inside
    if not draws:
        return case.check(
            "random state",
            Verdict.NOT_APPLICABLE,
            "no recomputed block draws random numbers (dropout=0.1 makes it)",
        )
    others = (case.run().forward_draws - case.plain.forward_draws).total()
    new = {draw: count for draw, count in draws.items() if draw not in case.run().forward_draws}
    if new:
        return case.check(
            "random state",
            Verdict.FAIL,
            f"{sum(new.values())} of {draws.total()} dropout masks of the recomputation are others than in forward",
            remedy="preserve_rng_state=True (accelerate's FSDP2 wrapper passes False)",
            new=sum(new.values()),
            draws=draws.total(),
            other_draws_in_forward=others,
        )
    return case.check(
        "random state",
        Verdict.PASS,
        f"{draws.total()} draws are repeated with the numbers of forward",
        draws=draws.total(),
        other_draws_in_forward=others,
    )


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    tolerance = TOLERANCES.get(one.dtype, 1e-4)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * size_of(one), equal_nan=True)
