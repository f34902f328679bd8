"""Registers the compiled device with torch, once per process: the device, `torch.sim`, and its collectives.

Collectives of `sim` tensors are staged through the host and run by gloo. Their backend is called `sim_gloo`:
`init_process_group("cpu:gloo,sim:sim_gloo")` makes a group for tensors of both kinds, which is what DDP needs.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from lowtide.errors import DeviceViolationError, SimDeviceError
from lowtide.simdevice import _build

if TYPE_CHECKING:
    from datetime import timedelta
    from types import ModuleType

BACKEND = "sim_gloo"
_NAME = "sim"


def register() -> ModuleType:
    """Load the library, take torch's PrivateUse1 slot under the name `sim`, and install `torch.sim`."""
    _check_slot_is_free()
    library = _build.load()
    from lowtide.simdevice import _torch_sim

    backend_registration.rename_privateuse1_backend(_NAME)
    torch._register_device_module(_NAME, _torch_sim)  # type: ignore[no-untyped-call]
    sys.modules[f"torch.{_NAME}"] = _torch_sim
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_collectives(library)
    atexit.register(_end_autograd_threads, library)
    library.register_device(DeviceViolationError)  # last: from here on the device counts as enabled
    return library


def _register_collectives(library: ModuleType) -> None:
    """Register the backend with torch.distributed, unless this torch is built without it."""
    if not dist.is_available():
        return

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

        gloo = ProcessGroupGloo(PrefixStore(BACKEND, store), rank, size, timeout)
        return library.stage_through_host(gloo)

    dist.Backend.register_backend(BACKEND, create, devices=["sim"])


def _check_slot_is_free() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", _NAME):
        raise SimDeviceError(
            f"torch has one slot for an out-of-tree device, and {taken!r} has taken it in this process: "
            "use the sim device in a process that does not load that backend"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != _NAME:
        raise SimDeviceError(
            f"torch allows one accelerator per process and found {accelerator.type!r}: "
            f"hide it to use the sim device (for CUDA: CUDA_VISIBLE_DEVICES='')"
        )


def _end_autograd_threads(library: ModuleType, patience: float = 2.0) -> None:
    """End the threads that run backward on the device while the interpreter still lives.

    Before Python 3.12, a thread of torch's that outlives the interpreter dies in a way that aborts the process
    (pytorch/pytorch#38228): "terminate called without an active exception", now and then, after all work is done.
    """
    library.stop_autograd_threads()
    deadline = time.monotonic() + patience
    while _autograd_threads() and time.monotonic() < deadline:
        time.sleep(0.001)


def _autograd_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(task.read_text().strip())
    return [name for name in names if name.startswith("pt_autograd")]
