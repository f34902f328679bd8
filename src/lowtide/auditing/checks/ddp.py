"""Will DDP accept it? It counts on one accumulation per parameter, of parameters that the loss's graph shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.auditing.reference import differ_between_ranks
from lowtide.auditing.report import CheckResult, Verdict, some

if TYPE_CHECKING:
    from lowtide.auditing.case import Case

_REMEDY = "use_reentrant=False, or lowtide.apply: then there is one graph, and each parameter is ready once"


def ready_for_ddp(case: Case) -> CheckResult:
    plain, seen = case.plain, case.run()
    twice = {name: n for name, n in seen.accumulations.items() if n > max(1, plain.accumulations[name])}
    hidden = sorted(name for name in seen.accumulations if name in plain.in_graph and name not in seen.in_graph)
    if twice:
        return case.check(
            "DDP readiness",
            Verdict.FAIL,
            f"{len(twice)} parameters are accumulated into several times in one backward, "
            f"{next(iter(twice))} {next(iter(twice.values()))} times: DDP marks them ready twice, or sends too early",
            remedy=_REMEDY,
            accumulations=dict(list(twice.items())[:8]),
            count=len(twice),
        )
    if hidden:
        return case.check(
            "DDP readiness",
            Verdict.FAIL,
            f"{len(hidden)} parameters get gradients that the loss's graph does not show: with "
            "find_unused_parameters=True DDP marks them ready twice",
            remedy=_REMEDY,
            hidden=some(hidden),
            count=len(hidden),
        )
    if not seen.accumulations:
        return case.check("DDP readiness", Verdict.INCONCLUSIVE, "no parameter was accumulated into")
    return case.check(
        "DDP readiness",
        Verdict.PASS,
        f"each of {len(seen.accumulations)} parameters is accumulated into once",
        parameters=len(seen.accumulations),
    )


def ranks_agree(case: Case) -> CheckResult:
    """After DDP's backward all ranks hold the same gradients. With a static graph and an output that DDP cannot look
    into they do not, and nothing is said."""
    name = "ranks agree"
    if not case.is_parallel:
        return case.check(name, Verdict.NOT_APPLICABLE, "the model is not inside DDP")
    different = differ_between_ranks(case.run().gradients)
    if different:
        return case.check(
            name,
            Verdict.FAIL,
            f"{len(different)} gradients differ between ranks: {', '.join(some(different, 3))}",
            remedy="DDP synchronises what it finds in the outputs: return tensors, dicts or dataclasses, or leave out "
            "static_graph=True",
            different=some(different),
            count=len(different),
        )
    return case.check(name, Verdict.PASS, f"{len(case.run().gradients)} gradients are the same on all ranks")
