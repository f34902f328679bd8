"""A plan that was never simulated: two policies, of which one fits 20 GiB."""

from __future__ import annotations

from lowtide.hardware.accelerators import find_accelerator, margins_for
from lowtide.planning import Plan
from lowtide.planning.result import judge
from lowtide.simulation.estimate import Estimate
from lowtide.simulation.simulator import ModelSummary
from lowtide.targets.job import Job

GIB = 2**30


def _estimate(policy: str, peak: int, seconds: float, *, timeline: bool = False) -> Estimate:
    points = [
        {"seconds": place / 10, "phase": phase, "region": "", "bytes": {"weights": GIB, "activations": place * GIB}}
        for place, phase in enumerate(("forward", "forward", "backward", "optimizer"))
    ]
    return Estimate(
        policy=policy,
        peak_bytes=peak,
        needed_bytes=peak,
        reserved_bytes=peak,
        host_bytes=0,
        seconds=seconds,
        busy={},
        owners={"weights": GIB, "saved": peak - GIB},
        phase="backward",
        region="layers.<3>",
        kernels={"flash": 2},
        exact=timeline,
        timeline=points if timeline else [],
    )


def make_plan(budget: int) -> Plan:
    job, card = Job(tokens=4096), find_accelerator("L40S")
    margins = margins_for(card, job.ranks)
    estimates = [_estimate("none", 30 * GIB, 1.0), _estimate("recompute; *.0: none", 8 * GIB, 1.3, timeline=True)]
    candidates = [judge(estimate, budget, 80 * GIB, margins) for estimate in estimates]
    summary = ModelSummary(
        name="tiny",
        model_class="Tiny",
        parameters=10**9,
        trained=10**6,
        dtype="fp32",
        regions=["layers.0"],
        longest=2048,
        tile_options=[""],
    )
    return Plan(
        summary=summary,
        job=job,
        accelerator=card,
        margins=margins,
        budget=budget,
        host_budget=80 * GIB,
        candidates=candidates,
        best=next((candidate for candidate in candidates if candidate.fits), None),
        fastest=next((candidate for candidate in candidates if candidate.fits), None),
        notes=["a note"],
    )
