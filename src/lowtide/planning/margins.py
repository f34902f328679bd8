"""What a device holds besides the caching allocator's memory: stated, not hidden in a factor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.planning.accelerators import Accelerator
    from lowtide.planning.job import Job

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Margins:
    """Bytes of each, on every rank."""

    context: int
    """The driver's context and the kernels that were loaded."""
    libraries: int = 64 * MIB
    """cuBLAS' workspaces (8 MiB per handle and stream, 32 MiB on Hopper) and cuDNN's."""
    communication: int = 0
    """NCCL's channels and buffers."""

    @property
    def total(self) -> int:
        return self.context + self.libraries + self.communication


def margins_for(job: Job, accelerator: Accelerator) -> Margins:
    """The margins of a job."""
    return Margins(context=accelerator.context, communication=400 * MIB if job.ranks > 1 else 0)
