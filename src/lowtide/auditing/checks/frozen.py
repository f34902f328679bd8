"""Adapters on a frozen base: do they still get their gradients?

LoRA's graph is that of a model in which a few weights inside the blocks train, and nothing before them does: the first
block's input needs no gradient. So the weights of the blocks' linear layers train here, in every stack (those of a
vision tower too), and everything else is frozen. The reference trains the same weights.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn

from lowtide.auditing.case import judged, only_trained
from lowtide.auditing.comparing import is_nothing
from lowtide.auditing.errors import NoGradientError
from lowtide.auditing.names import named_modules, some
from lowtide.auditing.step import observe
from lowtide.auditing.verdicts import Check, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.auditing.case import Case

NAME = "adapters on a frozen base"
_REMEDY = (
    "a reentrant checkpoint needs an input that needs a gradient, and a tower has none: use_reentrant=False, "
    "or lowtide.apply"
)


def frozen_base(case: Case) -> Check:
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
    known = set(case.compare(case.seen)[0].suspects)  # wrong without freezing, too: said elsewhere
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


def _all_lost(case: Case, names: frozenset[str]) -> Check:
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
