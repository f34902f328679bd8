"""Does the loss's graph reach every trainable parameter of the plain model?

A `detach`, a `torch.no_grad` or an `item` in a model's own code cuts the parameters before it off: they never train,
with or without checkpointing, and the loss may fall all the same. A parameter that the batch does not use has no
gradient either. An experiment tells the two apart: a parameter is changed a little, and forward runs again. If the loss
changes, and by a smaller change as well, it depends on the parameter, and the gradient is missing. A parameter that
only picks an index (the encoder of a codebook, under `argmin`) makes the loss jump, and has no gradient by nature.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from lowtide.auditing.result import CheckResult, Verdict, first_few
from lowtide.auditing.setups import PLAIN
from lowtide.modules import named_parameters

if TYPE_CHECKING:
    from lowtide.auditing.reference import Reference

_NAME = "parameters reached"
_MOST_TRIALS = 48
"""How many parameters are changed, each with up to three forwards of its own. Of more, every second or third is."""


def reached(reference: Reference) -> CheckResult:
    """Check that every trainable parameter on which the plain model's loss depends has a gradient."""
    gradients = reference.first.gradients
    trainable = [name for name, parameter in named_parameters(reference.model) if parameter.requires_grad]
    missing = [name for name in trainable if gradients[name] is None]
    if not missing:
        return _result(Verdict.PASS, f"the loss's graph reaches all {len(trainable)} trainable parameters")
    cut = reference.parameters_that_change_the_loss(missing[:: -(-len(missing) // _MOST_TRIALS)])
    unused = _reasons(reference, [name for name in missing if name not in cut])
    if not cut:
        why = ", ".join(f"{len(names)} {reason}" for reason, names in unused.items())
        return _result(
            Verdict.PASS,
            f"the loss's graph reaches {len(trainable) - len(missing)} of {len(trainable)} trainable parameters, and "
            f"this batch does not use the others: {why}",
            unused={reason: first_few(names) for reason, names in unused.items()},
        )
    tried = f" (of {len(missing)} without a gradient, not all were tried)" if len(missing) > _MOST_TRIALS else ""
    return _result(
        Verdict.FAIL,
        f"{len(cut)} trainable parameters never get a gradient, although the loss depends on them: "
        f"{', '.join(first_few(cut, 3))}{tried}. The model's own code cuts the graph, with or without checkpointing",
        remedy="look for detach(), torch.no_grad() or item() between these parameters and the loss; if it is meant, "
        "freeze them with requires_grad_(False)",
        cut=first_few(cut),
        count=len(cut),
        unused={reason: first_few(names) for reason, names in unused.items()},
    )


def _reasons(reference: Reference, names: list[str]) -> dict[str, list[str]]:
    """Sort unused parameters by why they are unused."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        if ".experts." in name:
            reason = "in experts that no token chose"
        elif not reference.first.forward_calls[name.rpartition(".")[0]]:
            reason = "in modules that forward never calls"
        else:
            reason = "in modules whose result the loss does not depend on, or only by an index that they pick"
        found[reason].append(name)
    return dict(found)


def _result(verdict: Verdict, summary: str, *, remedy: str | None = None, **evidence: object) -> CheckResult:
    return CheckResult(name=_NAME, mode=PLAIN, verdict=verdict, summary=summary, remedy=remedy, evidence=evidence)
