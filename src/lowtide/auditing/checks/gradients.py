"""Are the gradients there, and are they right?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.auditing.names import some
from lowtide.auditing.verdicts import Check, Verdict

if TYPE_CHECKING:
    from lowtide.auditing.case import Case

_NOISY = 1e-2
"""A reference that differs from its own rerun by more proves nothing."""


def present(case: Case) -> Check:
    if case.reference.is_vacuous:
        return _vacuous(case, "gradients present")
    if case.is_the_reference:
        return case.recomputes_too("gradients present")
    comparison, zeros = case.compare(case.seen)
    bad = [*comparison.lost, *comparison.gained]
    if bad:
        return case.check(
            "gradients present",
            Verdict.FAIL,
            f"{len(comparison.lost)} parameters lose their gradient"
            + (f", {len(comparison.gained)} gain one" if comparison.gained else "")
            + f": {', '.join(some(bad, 3))}",
            remedy="inputs that need no gradient, outputs in containers and reentrant checkpoints cut the graph: use "
            "use_reentrant=False, or lowtide.apply",
            lost=some(comparison.lost),
            gained=some(comparison.gained),
            count=len(bad),
            zero_by_mathematics=zeros,
        )
    count = sum(gradient is not None for gradient in case.seen.gradients.values())
    return case.check(
        "gradients present",
        Verdict.PASS,
        f"all {count} parameters that should have a gradient have one",
        count=count,
        zero_by_mathematics=zeros,
    )


def values(case: Case) -> Check:
    if case.reference.is_vacuous:
        return _vacuous(case, "gradient values")
    if case.is_the_reference:
        return case.recomputes_too("gradient values")
    if case.reference.own_error > _NOISY:
        return case.check(
            "gradient values",
            Verdict.INCONCLUSIVE,
            f"the plain model itself differs by {case.reference.own_error:.1e} from run to run",
            remedy="switch on torch.use_deterministic_algorithms(True)",
            own_error=case.reference.own_error,
        )
    comparison, zeros = case.compare(case.seen)
    if comparison.different:
        worst = max(comparison.different, key=lambda name: comparison.different[name])
        return case.check(
            "gradient values",
            Verdict.FAIL,
            f"{len(comparison.different)} gradients are wrong, {worst} by {comparison.different[worst]:.1e}",
            remedy="random state not restored, a buffer changed by forward, or a tensor changed in place: the checks "
            "below tell which",
            different=dict(list(comparison.different.items())[:8]),
            count=len(comparison.different),
            zero_by_mathematics=zeros,
        )
    how = "bit-identical" if comparison.identical else f"equal within {comparison.largest_error:.1e}"
    note = f"; {len(zeros)} zero by mathematics, computed as rounding: {', '.join(some(zeros, 3))}" if zeros else ""
    return case.check(
        "gradient values",
        Verdict.PASS,
        f"{how}{note}",
        identical=comparison.identical,
        largest_error=comparison.largest_error,
        zero_by_mathematics=zeros,
        noise=some(comparison.noise),
    )


def experts(case: Case) -> Check:
    """Experts that no token chose have no gradient in either run: they are not missing."""
    named = [name for name in case.plain.gradients if ".experts." in name]
    if not named:
        return case.check("experts", Verdict.NOT_APPLICABLE, "no mixture of experts")
    if case.reference.is_vacuous:
        return _vacuous(case, "experts")
    comparison, _ = case.compare(case.seen)
    bad = [name for name in [*comparison.lost, *comparison.gained] if name in named]
    unused = [name for name in named if (gradient := case.plain.gradients[name]) is None or not bool(gradient.any())]
    if bad:
        return case.check(
            "experts",
            Verdict.FAIL,
            f"experts with other gradients than in the plain model: {', '.join(some(bad, 3))}",
            remedy="the recomputed router chooses other experts, or gradients are dropped",
            experts=some(bad),
        )
    note = f"{len(unused)} unused by this batch, in both runs" if unused else "all of them used"
    return case.check("experts", Verdict.PASS, f"{len(named)} expert weights, {note}", unused=some(unused))


def _vacuous(case: Case, name: str) -> Check:
    return case.check(
        name,
        Verdict.INCONCLUSIVE,
        "the plain model's gradients are all zero, or its loss is not finite: nothing can be compared",
        remedy="give a batch with labels that count and a mask that is not empty; check the weights",
    )
