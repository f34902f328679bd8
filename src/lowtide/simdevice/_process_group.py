"""Collectives for `sim` tensors: staged through the host and carried by gloo.

The backend is called `sim_gloo`. `init_process_group("cpu:gloo,sim:sim_gloo")` makes a group that takes tensors of both
kinds, which is what DDP wants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from datetime import timedelta
    from types import ModuleType

BACKEND = "sim_gloo"


def register(library: ModuleType) -> None:
    """Tell torch.distributed about the backend, unless this torch is built without it."""
    if not dist.is_available():
        return

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

        gloo = ProcessGroupGloo(PrefixStore(BACKEND, store), rank, size, timeout)
        return library.stage_through_host(gloo)

    dist.Backend.register_backend(BACKEND, create, devices=["sim"])
