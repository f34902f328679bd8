"""Describes the machine for a record: versions, device, driver and allocator settings; no host name, user or path."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from lowtide._version import __version__
from lowtide.compat import installed_version
from lowtide.machine import Machine

if TYPE_CHECKING:
    from lowtide.selftest.bench import Bench

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "deepspeed",
    "liger-kernel",
    "unsloth",
    "unsloth-zoo",
    "triton",
)

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_LIBC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def describe(bench: Bench) -> dict[str, Any]:
    """Return what a reader of the record must know about the machine."""
    machine = Machine()
    return {
        "lowtide": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "wsl": machine.is_wsl,
        "packages": {name: str(version) for name in PACKAGES if (version := installed_version(name)) is not None},
        "runtime": _runtime(),
        "device": _device(bench),
        "driver": machine.nvidia_driver,
        "allocator": {name: os.environ[name] for name in (*_ALLOCATOR, *_LIBC) if name in os.environ},
        "cpu": cpu_name(),
        "host_memory": psutil.virtual_memory().total,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def _runtime() -> dict[str, str | None]:
    """Return the versions of the libraries that torch was built with or has found."""
    cudnn: Any = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    nccl: Any = torch.cuda.nccl.version() if has_nccl else None  # type: ignore[no-untyped-call]
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
    }


def _device(bench: Bench) -> dict[str, Any]:
    kind = bench.device.type
    if kind == "cpu":
        return {"type": kind, "name": cpu_name(), "count": 1, "memory": psutil.virtual_memory().total}
    module = torch.get_device_module(bench.device)
    capability = module.get_device_capability() if kind in ("cuda", "xpu") else None
    return {
        "type": kind,
        "name": module.get_device_name() if hasattr(module, "get_device_name") else kind,
        "count": torch.accelerator.device_count(),
        "memory": _memory(),
        "capability": ".".join(map(str, capability)) if isinstance(capability, tuple) else None,
    }


def _memory() -> int | None:
    try:
        return int(torch.accelerator.get_memory_info()[1])
    except (RuntimeError, NotImplementedError):  # a backend that does not tell
        return None


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
