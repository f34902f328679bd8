"""Chooses the model of a training engine for a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.simulation.fsdp2 import Fsdp2
from lowtide.simulation.parallel import Parallel
from lowtide.simulation.zero3 import Zero3

if TYPE_CHECKING:
    from torch import nn

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.policy import Policy
    from lowtide.simulation.ledger import Ledger
    from lowtide.targets.job import Job


def make_parallel(
    model: nn.Module, job: Job, policy: Policy, ledger: Ledger, accelerator: Accelerator | None
) -> Parallel:
    """Return one rank's share of a model under the job's engine."""
    if job.engine == "fsdp2":
        return Fsdp2(model, job, ledger, accelerator)
    if job.engine == "zero3":
        return Zero3(model, job, policy, ledger, accelerator)
    return Parallel(model, job, ledger, accelerator)
