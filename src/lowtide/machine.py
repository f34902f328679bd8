"""Reads the system's files about accelerators and memory: PCIe links, NUMA nodes, limits of containers, huge pages.

Nothing is judged here and nothing is measured. A file that is missing or that has no number in it is a fact that is not
known, which is None. All paths begin at `root`, so that another machine's files can be read.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PciDevice:
    """One device on the PCI bus."""

    address: str
    width: int | None
    """How wide its link is now: 8 of `x8`."""
    most_width: int | None
    """How wide the device can be linked."""
    speed: float | None
    """Transfers per second, in units of 1e9, which the width multiplies. Devices lower it while they are idle."""
    most_speed: float | None
    slot_speed: float | None
    """The most that the other end of the link allows: a slot, or a bridge."""
    numa_node: int | None
    """None if the machine has one node, or does not tell."""
    local_cpus: frozenset[int]
    """The processors of that node."""

    @property
    def link(self) -> str:
        """The link in words: `x8 of x16, 32 of 32 GT/s`."""
        width = f"x{self.width} of x{self.most_width}"
        return width if self.speed is None else f"{width}, {self.speed:g} of {self.most_speed:g} GT/s"


@dataclasses.dataclass(frozen=True)
class Machine:
    """One machine's system files."""

    root: Path = Path("/")

    def pci_device(self, address: str) -> PciDevice:
        """Read what the system says about a device at an address such as `0000:65:00.0`."""
        folder = self.root / "sys/bus/pci/devices" / address
        node = _number(folder / "numa_node")
        node = None if node is None or node < 0 else int(node)
        cpus = self.root / f"sys/devices/system/node/node{node}/cpulist"
        return PciDevice(
            address=address,
            width=_whole(folder / "current_link_width"),
            most_width=_whole(folder / "max_link_width"),
            speed=_number(folder / "current_link_speed"),
            most_speed=_number(folder / "max_link_speed"),
            slot_speed=_number(folder.resolve().parent / "max_link_speed"),  # a link leads to where the device is
            numa_node=node,
            local_cpus=frozenset() if node is None else parse_cpus(_text(cpus) or ""),
        )

    @property
    def memory_limit(self) -> int | None:
        """The least limit of memory among this process's control groups, in bytes; None if there is none."""
        limits = [_whole(path) for path in self._limit_files()]
        least = min((limit for limit in limits if limit is not None), default=None)
        total = self.memory
        return None if least is None or (total is not None and least >= total) else least

    def _limit_files(self) -> list[Path]:
        """Return the files with a limit: those of the groups of this process, and of all groups around them."""
        top = self.root / "sys/fs/cgroup"
        found = [top / "memory.max", top / "memory/memory.limit_in_bytes"]
        for line in (_text(self.root / "proc/self/cgroup") or "").splitlines():
            _, controllers, group, *_ = [*line.split(":", 2), "", ""]
            if controllers not in ("", "memory"):
                continue
            base, name = (top / "memory", "memory.limit_in_bytes") if controllers else (top, "memory.max")
            parts = [part for part in group.split("/") if part not in ("", "..")]
            found += [base.joinpath(*parts[: count + 1], name) for count in range(len(parts))]
        return found

    @property
    def memory(self) -> int | None:
        """The machine's memory in bytes."""
        found = re.search(r"^MemTotal:\s+(\d+) kB", _text(self.root / "proc/meminfo") or "", re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    @property
    def huge_pages(self) -> str | None:
        """What the system does with transparent huge pages: `always`, `madvise` or `never`."""
        found = re.search(r"\[(\w+)\]", _text(self.root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
        return found[1] if found else None

    @property
    def nvidia_driver(self) -> str | None:
        """The version of NVIDIA's driver, in WSL2 that of Windows, which no file tells; None where there is none."""
        text = _text(self.root / "proc/driver/nvidia/version") or ""
        found = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", text)
        if found is None and self.is_wsl:
            found = re.search(r"^(\d[\d.]*)", _output([str(self.root / _WSL_SMI), *_ASK_FOR_DRIVER]))
        return found[1] if found else None

    @property
    def is_wsl(self) -> bool:
        """Whether this is the Windows Subsystem for Linux."""
        release = _text(self.root / "proc/sys/kernel/osrelease") or platform.release()
        return "microsoft" in release.lower()


_WSL_SMI = "usr/lib/wsl/lib/nvidia-smi"
"""Where Windows puts the program into WSL2."""
_ASK_FOR_DRIVER = ("--query-gpu=driver_version", "--format=csv,noheader")


def accelerator_addresses() -> list[str]:
    """Return the PCI addresses of the accelerators that torch sees."""
    if not torch.cuda.is_available():
        return []
    found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0" for p in found]


def allocator_settings() -> dict[str, str]:
    """Return the settings of torch's allocator that the environment makes."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    pairs = (part.partition(":") for part in text.split(",") if part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_cpus(text: str) -> frozenset[int]:
    """Read a list of processors as the system writes it: `0-15,32-47`."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _output(command: list[str]) -> str:
    """Return what a program prints; nothing if it is not there or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout  # noqa: S603  (no input from outside)
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(path: Path) -> float | None:
    """Read the number that a file begins with; None for a word such as `max` or `Unknown`."""
    found = re.match(r"-?\d+(\.\d+)?", (_text(path) or "").strip())
    return float(found[0]) if found else None


def _whole(path: Path) -> int | None:
    found = re.match(r"\d+\s*$", _text(path) or "")
    return int(found[0]) if found else None
