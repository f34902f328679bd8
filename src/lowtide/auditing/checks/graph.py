"""Does the loss's graph reach every trainable parameter of the plain model?

A `detach`, a `torch.no_grad` or an `item` in a model's own code cuts the parameters before it off: they never train,
with or without checkpointing, and the loss may fall all the same. A parameter that the batch does not use has no
gradient either, nor has one that only picks an index (the encoder of a codebook, under `argmin`). An experiment tells
them apart (`dependence`): the loss moves smoothly with a parameter that is cut off.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from lowtide.auditing.result import CheckResult, Verdict, first_few, listed
from lowtide.auditing.setups import PLAIN
from lowtide.modules import ancestors, named_parameters

if TYPE_CHECKING:
    from lowtide.auditing.dependence import Dependence
    from lowtide.auditing.reference import Reference

_NAME = "parameters reached"


def reached(reference: Reference) -> CheckResult:
    """Check that every trainable parameter on which the plain model's loss depends has a gradient."""
    gradients = reference.first.gradients
    trainable = [name for name, parameter in named_parameters(reference.model) if parameter.requires_grad]
    missing = [name for name in trainable if gradients[name] is None]
    if not missing:
        return _result(Verdict.PASS, f"the loss's graph reaches all {len(trainable)} trainable parameters")
    found = reference.dependence_on(missing)
    if not found.is_known:
        return _result(
            Verdict.INCONCLUSIVE,
            f"{len(missing)} of {len(trainable)} trainable parameters have no gradient, and a loss that is not finite "
            "does not tell why",
            count=len(missing),
        )
    unused = _reasons(reference, [name for name in missing if name not in {*found.on, *found.untried}])
    if found.on or found.untried:
        return _cut(found, unused)
    why = ", ".join(f"{len(names)} {reason}" for reason, names in unused.items())
    return _result(
        Verdict.PASS,
        f"the loss's graph reaches {len(trainable) - len(missing)} of {len(trainable)} trainable parameters, and "
        f"this batch does not use the others: {why}. DDP needs find_unused_parameters=True for them",
        unused={reason: first_few(names) for reason, names in unused.items()},
    )


def _cut(found: Dependence, unused: dict[str, list[str]]) -> CheckResult:
    named = f"{len(found.on)} trainable parameters never get a gradient, although the loss depends on them"
    some = f"some of {len(found.untried)} trainable parameters never get a gradient, although the loss depends on them"
    few = ", ".join(first_few(found.on or found.untried, 3))
    more = (
        f" ({len(found.untried)} more were not tried one by one, and the loss depends on some of them)"
        if found.on and found.untried
        else ""
    )
    return _result(
        Verdict.FAIL,
        f"{named if found.on else some}: {few}{more}. The model's own code cuts the graph, with or without "
        "checkpointing",
        remedy="look for detach(), torch.no_grad() or item() between these parameters and the loss; if it is meant, "
        "freeze them with requires_grad_(False)",
        cut=first_few(found.on),
        untried=first_few(found.untried),
        count=len(found.on) + len(found.untried),
        unused={reason: first_few(names) for reason, names in unused.items()},
    )


def _reasons(reference: Reference, names: list[str]) -> dict[str, list[str]]:
    """Sort unused parameters by why they are unused. A tower that forward never enters is named as a whole."""
    entered = _entered(reference)
    idle = {name: next((parent for parent in _around(name) if parent not in entered), None) for name in names}
    towers = listed(list(dict.fromkeys(tower for tower in idle.values() if tower is not None)))
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        if ".experts." in name:
            reason = "in experts that no token chose"
        elif idle[name] is not None:
            reason = f"in {towers}, which forward never calls"
        else:
            reason = "in modules whose result the loss does not depend on, or only by an index that they pick"
        found[reason].append(name)
    return dict(found)


def _entered(reference: Reference) -> set[str]:
    """Return the modules in which anything was called, or gets a gradient: some weights are used without a call."""
    called = [name for name, count in reference.first.forward_calls.items() if count]
    trained = [name for name, gradient in reference.first.gradients.items() if gradient is not None]
    return {*called, *(module for name in (*called, *trained) for module in ancestors(name))}


def _around(name: str) -> list[str]:
    """Return the modules around a parameter, the outermost first."""
    return list(ancestors(name))[::-1]


def _result(verdict: Verdict, summary: str, *, remedy: str | None = None, **evidence: object) -> CheckResult:
    return CheckResult(name=_NAME, mode=PLAIN, verdict=verdict, summary=summary, remedy=remedy, evidence=evidence)
