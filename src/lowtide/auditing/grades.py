"""Grades failed checks by what they cost: wrong results, no effect, a danger elsewhere, or a mess.

A check has one grade, which the table below states, so that a stored record without grades can be graded, too. A
check may say that a single failure is worse than usual (`CheckResult.escalated`).
"""

from __future__ import annotations

import enum

from lowtide.errors import CannotAuditError


class Grade(enum.StrEnum):
    """How bad a failed check is. The grades stand here from the mildest to the worst."""

    UNTIDY = "untidy"
    """Training is right, but the set-up leaves hooks behind, or the model can no longer be copied."""
    UNSAFE = "unsafe"
    """This step is right, but DDP or a change in place would make it wrong."""
    NO_EFFECT = "no-effect"
    """The set-up does not do what it is there for: blocks are not recomputed, or no bytes are saved or moved."""
    WRONG = "wrong"
    """Gradients, outputs, buffers or random draws are not the plain model's, or the step raises."""

    def reaches(self, threshold: Grade) -> bool:
        """Return whether this is as bad as the threshold, or worse."""
        order = list(Grade)
        return order.index(self) >= order.index(threshold)


GRADES = {
    "runs": Grade.WRONG,
    "parameters reached": Grade.WRONG,
    "gradients present": Grade.WRONG,
    "gradient values": Grade.WRONG,
    "experts": Grade.WRONG,
    "outputs": Grade.WRONG,
    "buffers": Grade.WRONG,
    "random state": Grade.WRONG,
    "adapters on a frozen base": Grade.WRONG,
    "recomputed": Grade.NO_EFFECT,
    "memory": Grade.NO_EFFECT,
    "offload": Grade.NO_EFFECT,
    "DDP readiness": Grade.UNSAFE,
    "ranks agree": Grade.UNSAFE,
    "in-place changes": Grade.UNSAFE,
    "idempotent": Grade.UNTIDY,
    "reversible": Grade.UNTIDY,
    "copy and pickle": Grade.UNTIDY,
}
"""What a failure of each check means."""


def grade_named(word: Grade | str) -> Grade:
    """Return the grade that a word stands for."""
    try:
        return Grade(word)
    except ValueError:
        raise CannotAuditError(f"unknown grade {word!r}: choose from {', '.join(reversed(Grade))}") from None
