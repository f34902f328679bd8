"""Are the gradients there, and are they right: of all parameters, of experts, and of adapters on a frozen base?

Adapters such as LoRA's make a different graph: a few weights inside the blocks train and nothing before them does, so
that the first block's input requires no gradient. `frozen_base` trains the weights of the blocks' linear layers, in
every stack (a vision tower's, too), and freezes everything else; the reference trains the same weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lowtide.auditing.comparison import is_none_or_zero
from lowtide.auditing.reference import training_only
from lowtide.auditing.result import CheckResult, Verdict, first_few
from lowtide.auditing.step import observe
from lowtide.errors import NoGradientError
from lowtide.modules import named_modules

if TYPE_CHECKING:
    from lowtide.auditing.case import Case

_NOISY = 1e-2
"""A reference whose rerun differs by more than this proves nothing."""

_FROZEN_BASE = "adapters on a frozen base"
_FROZEN_BASE_REMEDY = (
    "a reentrant checkpoint passes gradients on only if one of its inputs requires one, and on a frozen base the first "
    "block's input does not: pass use_reentrant=False, or use lowtide.apply"
)


def present(case: Case) -> CheckResult:
    """Check that the same parameters have a gradient as in the plain model."""
    name = "gradients present"
    if case.reference.is_vacuous:
        return _vacuous(case, name)
    if case.is_the_reference:
        return case.without_plain_reference(name)
    comparison, zeros = case.reference.compare(case.run())
    bad = [*comparison.lost, *comparison.gained]
    if bad:
        return case.result(
            name,
            Verdict.FAIL,
            f"{len(comparison.lost)} parameters lose their gradient"
            + (f", {len(comparison.gained)} gain one" if comparison.gained else "")
            + f": {', '.join(first_few(bad, 3))}",
            remedy="reentrant checkpoints cut the graph if no input requires a gradient or outputs are in containers: "
            "pass use_reentrant=False, or use lowtide.apply",
            lost=first_few(comparison.lost),
            gained=first_few(comparison.gained),
            count=len(bad),
            zero_by_mathematics=zeros,
        )
    count = sum(gradient is not None for gradient in case.run().gradients.values())
    return case.result(
        name,
        Verdict.PASS,
        f"all {count} parameters that should have a gradient have one",
        count=count,
        zero_by_mathematics=zeros,
    )


def values(case: Case) -> CheckResult:
    """Check that every gradient has the plain model's value, but for rounding."""
    name = "gradient values"
    if case.reference.is_vacuous:
        return _vacuous(case, name)
    if case.is_the_reference:
        return case.without_plain_reference(name)
    if case.reference.rerun_error > _NOISY:
        return case.result(
            name,
            Verdict.INCONCLUSIVE,
            f"the plain model's own gradients differ by {case.reference.rerun_error:.1e} from run to run",
            remedy="call torch.use_deterministic_algorithms(True) before the audit",
            own_error=case.reference.rerun_error,
        )
    comparison, zeros = case.reference.compare(case.run())
    if comparison.different:
        worst = max(comparison.different, key=lambda name: comparison.different[name])
        return case.result(
            name,
            Verdict.FAIL,
            f"{len(comparison.different)} gradients are wrong, {worst} by {comparison.different[worst]:.1e}",
            remedy="the random state is not restored, forward changes a buffer, or a tensor is changed in place: the "
            "checks below tell which",
            different=dict(list(comparison.different.items())[:8]),
            count=len(comparison.different),
            zero_by_mathematics=zeros,
        )
    how = "bit-identical" if comparison.identical else f"equal within {comparison.largest_error:.1e}"
    few = ", ".join(first_few(zeros, 3))
    note = f"; {len(zeros)} are mathematically zero and computed as rounding: {few}" if zeros else ""
    return case.result(
        name,
        Verdict.PASS,
        f"{how}{note}",
        identical=comparison.identical,
        largest_error=comparison.largest_error,
        rerun_identical=not any(case.reference.rerun_errors.values()),
        zero_by_mathematics=zeros,
        noise=first_few(comparison.noise),
    )


def experts(case: Case) -> CheckResult:
    """Check the gradients of experts. One that no token chose has no gradient in either run: it is not missing."""
    named = [name for name in case.plain.gradients if ".experts." in name]
    if not named:
        return case.result("experts", Verdict.NOT_APPLICABLE, "no mixture of experts")
    if case.reference.is_vacuous:
        return _vacuous(case, "experts")
    comparison, _ = case.reference.compare(case.run())
    bad = [name for name in [*comparison.lost, *comparison.gained] if name in named]
    unused = [name for name in named if is_none_or_zero(case.plain.gradients[name])]
    if bad:
        return case.result(
            "experts",
            Verdict.FAIL,
            f"{len(bad)} expert weights lose or gain a gradient: {', '.join(first_few(bad, 3))}",
            remedy="the router chooses different experts in the recompute, or the set-up drops gradients",
            experts=first_few(bad),
        )
    note = f"{len(unused)} unused by this batch, in both runs" if unused else "all of them used"
    return case.result("experts", Verdict.PASS, f"{len(named)} expert weights, {note}", unused=first_few(unused))


def _vacuous(case: Case, name: str) -> CheckResult:
    return case.result(
        name,
        Verdict.INCONCLUSIVE,
        "the plain model's gradients are all zero, or its loss is not finite: nothing can be compared",
        remedy="give a batch with labels that are not all ignored and a mask that is not empty; check the weights",
    )


def frozen_base(case: Case) -> CheckResult:
    """Check the gradients of adapter-like weights inside the blocks while everything else is frozen."""
    names = _weights_in_blocks(case)
    if not names:
        return case.result(_FROZEN_BASE, Verdict.NOT_APPLICABLE, "no block of the model has a linear layer")
    plain = case.reference.trained_only(names)
    if all(is_none_or_zero(plain.gradients[name]) for name in names):
        what = "the plain model gives the blocks' linear weights no gradient either"
        return case.result(_FROZEN_BASE, Verdict.INCONCLUSIVE, what)
    try:
        with training_only(case.source, names):  # weights are frozen before the set-up is installed, as with LoRA
            seen = observe(case.install().model, case.experiment)
    except NoGradientError:  # the graph reaches none of them
        return _all_lost(case, names)
    comparison, zeros = case.reference.compare(seen, trained=names)
    known = set(case.reference.compare(case.run())[0].suspects)  # wrong without freezing, too: other checks say so
    comparison.acquit(known)
    bad = comparison.suspects
    if bad:
        return case.result(
            _FROZEN_BASE,
            Verdict.FAIL,
            f"{len(comparison.lost)} of {len(names)} adapter weights get no gradient, "
            f"{len(comparison.different)} get a wrong one"
            + (f", {len(comparison.gained)} get one that they lack in the plain model" if comparison.gained else "")
            + f": {', '.join(first_few(bad, 3))}",
            remedy=_FROZEN_BASE_REMEDY,
            lost=first_few(comparison.lost),
            gained=first_few(comparison.gained),
            different=dict(list(comparison.different.items())[:8]),
            count=len(bad),
        )
    right = [name for name in names if not is_none_or_zero(plain.gradients[name]) and name not in known.union(zeros)]
    if not right:
        what = "these weights' gradients are wrong without a frozen base, too, or rounding: nothing is left to compare"
        return case.result(_FROZEN_BASE, Verdict.INCONCLUSIVE, what, zero_by_mathematics=zeros)
    return case.result(
        _FROZEN_BASE,
        Verdict.PASS,
        f"{len(right)} weights in blocks train on a frozen base, with the plain model's gradients",
        count=len(right),
        zero_by_mathematics=zeros,
    )


def _all_lost(case: Case, names: frozenset[str]) -> CheckResult:
    return case.result(
        _FROZEN_BASE,
        Verdict.FAIL,
        f"none of {len(names)} adapter weights gets a gradient: the loss no longer requires one",
        remedy=_FROZEN_BASE_REMEDY,
        lost=first_few(sorted(names)),
        count=len(names),
    )


def _weights_in_blocks(case: Case) -> frozenset[str]:
    """Return the linear weights in blocks that ran, each once: a shared weight is known by its first name."""
    prefixes = tuple(f"{block}." for block in case.blocks if case.plain.forward_calls[block])
    linear = (
        f"{name}.weight"
        for name, module in named_modules(case.reference.model)
        if isinstance(module, nn.Linear) and name.startswith(prefixes) and module.weight.is_floating_point()
    )
    return frozenset(weight for weight in linear if weight in case.plain.gradients)
