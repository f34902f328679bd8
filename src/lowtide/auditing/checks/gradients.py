"""Are the gradients there, and are they right?

Adapters on a frozen base: do they still get their gradients?

LoRA's graph is that of a model in which a few weights inside the blocks train, and nothing before them does: the first
block's input needs no gradient. So the weights of the blocks' linear layers train here, in every stack (those of a
vision tower too), and everything else is frozen. The reference trains the same weights.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn

from lowtide.auditing.case import judged
from lowtide.auditing.comparison import is_nothing
from lowtide.auditing.reference import only_trained
from lowtide.auditing.report import CheckResult, Verdict, some
from lowtide.auditing.step import observe
from lowtide.errors import NoGradientError
from lowtide.modules import named_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.auditing.case import Case

_NOISY = 1e-2
"""A reference that differs from its own rerun by more proves nothing."""


def present(case: Case) -> CheckResult:
    if case.reference.is_vacuous:
        return _vacuous(case, "gradients present")
    if case.is_the_reference:
        return case.recomputes_too("gradients present")
    comparison, zeros = case.compare(case.run())
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
    count = sum(gradient is not None for gradient in case.run().gradients.values())
    return case.check(
        "gradients present",
        Verdict.PASS,
        f"all {count} parameters that should have a gradient have one",
        count=count,
        zero_by_mathematics=zeros,
    )


def values(case: Case) -> CheckResult:
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
    comparison, zeros = case.compare(case.run())
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


def experts(case: Case) -> CheckResult:
    """Experts that no token chose have no gradient in either run: they are not missing."""
    named = [name for name in case.plain.gradients if ".experts." in name]
    if not named:
        return case.check("experts", Verdict.NOT_APPLICABLE, "no mixture of experts")
    if case.reference.is_vacuous:
        return _vacuous(case, "experts")
    comparison, _ = case.compare(case.run())
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


def _vacuous(case: Case, name: str) -> CheckResult:
    return case.check(
        name,
        Verdict.INCONCLUSIVE,
        "the plain model's gradients are all zero, or its loss is not finite: nothing can be compared",
        remedy="give a batch with labels that count and a mask that is not empty; check the weights",
    )


NAME = "adapters on a frozen base"

_REMEDY = (
    "a reentrant checkpoint needs an input that needs a gradient, and a tower has none: use_reentrant=False, "
    "or lowtide.apply"
)


def frozen_base(case: Case) -> CheckResult:
    names = _weights_in_blocks(case)
    if not names:
        return case.check(NAME, Verdict.NOT_APPLICABLE, "no linear layer in a block of the model")
    plain = case.reference.with_only(names)
    if all(is_nothing(plain.gradients[name]) for name in names):
        return case.check(NAME, Verdict.INCONCLUSIVE, "the plain model gives these weights no gradient either")
    try:
        with _installed_with(case, names) as model:
            seen = observe(model, case.experiment)
    except NoGradientError:  # none of them is reached
        return _all_lost(case, names)
    comparison, zeros = judged(case.reference, plain, seen, trained=names)
    known = set(case.compare(case.run())[0].suspects)  # wrong without freezing, too: said elsewhere
    comparison.acquit(known)
    bad = comparison.suspects
    if bad:
        return case.check(
            NAME,
            Verdict.FAIL,
            f"{len(comparison.lost)} of {len(names)} adapter weights get no gradient, "
            f"{len(comparison.different)} a wrong one"
            + (f", {len(comparison.gained)} one that the plain model's have not" if comparison.gained else "")
            + f": {', '.join(some(bad, 3))}",
            remedy=_REMEDY,
            lost=some(comparison.lost),
            gained=some(comparison.gained),
            different=dict(list(comparison.different.items())[:8]),
            count=len(bad),
        )
    right = [name for name in names if not is_nothing(plain.gradients[name]) and name not in known.union(zeros)]
    if not right:
        what = "what these weights get is wrong without a frozen base, too, or rounding: nothing is left to judge"
        return case.check(NAME, Verdict.INCONCLUSIVE, what, zero_by_mathematics=zeros)
    return case.check(
        NAME,
        Verdict.PASS,
        f"{len(right)} weights in blocks train on a frozen base, with the plain model's gradients",
        count=len(right),
        zero_by_mathematics=zeros,
    )


def _all_lost(case: Case, names: frozenset[str]) -> CheckResult:
    return case.check(
        NAME,
        Verdict.FAIL,
        f"none of {len(names)} adapter weights gets a gradient: the loss does not need one any more",
        remedy=_REMEDY,
        lost=some(sorted(names)),
        count=len(names),
    )


def _weights_in_blocks(case: Case) -> frozenset[str]:
    """Each once: a weight that several layers share goes by its first name."""
    prefixes = tuple(f"{block}." for block in case.blocks() if case.plain.forward_calls[block])
    linear = (
        f"{name}.weight"
        for name, module in named_modules(case.reference.model)
        if isinstance(module, nn.Linear) and name.startswith(prefixes) and module.weight.is_floating_point()
    )
    return frozenset(weight for weight in linear if weight in case.plain.gradients)


@contextlib.contextmanager
def _installed_with(case: Case, names: frozenset[str]) -> Iterator[nn.Module]:
    """Weights are frozen before the set-up is installed, as one does with LoRA."""
    with only_trained(case.source, names):
        yield case.install().model
