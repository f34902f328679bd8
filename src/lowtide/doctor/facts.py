"""The plain facts: versions, accelerator, memory, disk, compiler."""

from __future__ import annotations

import dataclasses
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from lowtide import compat, simdevice
from lowtide._version import __version__
from lowtide.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of the report."""

    group: str
    name: str
    value: str
    note: str = ""


def gather_facts() -> list[Fact]:
    """All facts, grouped in the order in which they are shown."""
    return [*_software(), *_accelerator(), *_host(), *_emulated_device()]


def _software() -> list[Fact]:
    facts = [
        Fact("software", "lowtide", __version__),
        Fact("software", "python", platform.python_version(), sys.executable),
    ]
    for package, tested in compat.TESTED.items():
        version = compat.installed_version(package)
        same = version is not None and version.public == tested.public
        note = "" if same else f"tested with {tested}"
        facts.append(Fact("software", package, "not installed" if version is None else str(version), note))
    return facts


def _accelerator() -> list[Fact]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return [Fact("accelerator", "device", "none", "the emulated device needs none")]
    facts = [Fact("accelerator", "device", f"{torch.accelerator.device_count()} x {device.type}", _device_name(device))]
    free, total = torch.accelerator.get_memory_info()
    facts.append(Fact("accelerator", "memory", format_bytes(total), f"{format_bytes(free)} free"))
    return facts


def _device_name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return str(module.get_device_name(0)) if hasattr(module, "get_device_name") else ""


def _host() -> list[Fact]:
    memory = psutil.virtual_memory()
    scratch = Path(tempfile.gettempdir())
    disk = shutil.disk_usage(scratch)
    return [
        Fact("host", "cores", str(psutil.cpu_count(logical=False) or psutil.cpu_count())),
        Fact("host", "memory", format_bytes(memory.total), f"{format_bytes(memory.available)} available"),
        Fact("host", "pinned memory", _pinned_memory(), "where offloaded activations live"),
        Fact("host", "disk", f"{format_bytes(disk.free)} free", f"in {scratch} ({_file_system(scratch)})"),
    ]


def _pinned_memory() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {format_bytes(soft)}"
    if not torch.accelerator.is_available():
        return f"needs an accelerator ({limit} of locked memory)"
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        return f"failed: {str(error).splitlines()[0]}"
    return f"works ({limit} of locked memory)"


def _file_system(path: Path) -> str:
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in [path, *path.parents] if parent in mounts), "unknown")


def _emulated_device() -> list[Fact]:
    tools = simdevice.toolchain()
    return [
        Fact("emulated device", "compiler", tools.compiler or "not found", "" if tools.compiler else "install g++"),
        Fact("emulated device", "ninja", tools.ninja or "not found", "" if tools.ninja else "pip install lowtide[sim]"),
        Fact("emulated device", "library", "built" if tools.built else "built on first use", str(tools.cache)),
    ]
