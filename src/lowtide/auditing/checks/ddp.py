"""Will DDP accept the set-up, and do the ranks agree?

DDP relies on each parameter accumulating its gradient once, and on finding every such parameter in the loss's graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.auditing.reference import differ_between_ranks
from lowtide.auditing.result import CheckResult, Verdict, first_few

if TYPE_CHECKING:
    from lowtide.auditing.case import Case

_REMEDY = "pass use_reentrant=False, or use lowtide.apply: then there is one graph, and each parameter is ready once"


def ready_for_ddp(case: Case) -> CheckResult:
    """Check that each parameter accumulates once, and that those in the plain graph are in this one."""
    name = "DDP readiness"
    plain, seen = case.plain, case.run()
    repeated = {weight: n for weight, n in seen.accumulations.items() if n > max(1, plain.accumulations[weight])}
    hidden = sorted(weight for weight in seen.accumulations if weight in plain.in_graph and weight not in seen.in_graph)
    if repeated:
        first, times = next(iter(repeated.items()))
        return case.result(
            name,
            Verdict.FAIL,
            f"{len(repeated)} parameters accumulate a gradient several times in one backward, {first} {times} times: "
            "DDP marks them ready twice, or reduces them too early",
            remedy=_REMEDY,
            accumulations=dict(list(repeated.items())[:8]),
            count=len(repeated),
        )
    if hidden:
        return case.result(
            name,
            Verdict.FAIL,
            f"{len(hidden)} parameters get a gradient, but are not in the loss's graph: with "
            "find_unused_parameters=True DDP marks them ready twice",
            remedy=_REMEDY,
            hidden=first_few(hidden),
            count=len(hidden),
        )
    if not seen.accumulations:
        return case.result(name, Verdict.INCONCLUSIVE, "no parameter accumulated a gradient")
    return case.result(
        name,
        Verdict.PASS,
        f"each of {len(seen.accumulations)} parameters is accumulated into once",
        parameters=len(seen.accumulations),
    )


def ranks_agree(case: Case) -> CheckResult:
    """Check that all ranks hold the same gradients after DDP's backward.

    With a static graph and an output that DDP cannot look into they do not, and DDP says nothing.
    """
    name = "ranks agree"
    if not case.is_ddp:
        return case.result(name, Verdict.NOT_APPLICABLE, "the model is not inside DDP")
    different = differ_between_ranks(case.run().gradients)
    if different:
        return case.result(
            name,
            Verdict.FAIL,
            f"{len(different)} gradients differ between ranks: {', '.join(first_few(different, 3))}",
            remedy="DDP synchronises only what it finds in the outputs: return tensors, dicts or dataclasses, or leave "
            "out static_graph=True",
            different=first_few(different),
            count=len(different),
        )
    return case.result(name, Verdict.PASS, f"{len(case.run().gradients)} gradients are the same on all ranks")
