"""Examines this process and this machine: the data behind `lowtide doctor`.

Facts are versions, accelerator, memory, disk and compiler: what a bug report needs. Hazards are known traps: patches,
versions and limits under which training goes wrong, often silently. A hazard is reported only if it is really there (a
function that was replaced in this process, an installed version that has the fault), and it says what happens and what
to do.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.utils.checkpoint
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lowtide import compat, simdevice
from lowtide._version import __version__
from lowtide.machine import Machine, accelerator_addresses, allocator_settings
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

__all__ = ["Diagnosis", "Fact", "Hazard", "Severity", "examine"]


def examine() -> Diagnosis:
    """Examine this process and this machine. Nothing is imported, installed, compiled or changed."""
    return Diagnosis(facts=gather_facts(), hazards=find_hazards())


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Everything that `lowtide doctor` found."""

    facts: list[Fact]
    hazards: list[Hazard]

    @property
    def ok(self) -> bool:
        """Whether Lowtide can work here: errors count, warnings do not."""
        return all(hazard.severity is not Severity.ERROR for hazard in self.hazards)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line about the machine."""

    group: str
    name: str
    value: str
    note: str = ""


class Severity(enum.StrEnum):
    ERROR = "error"
    """Lowtide cannot work."""
    WARNING = "warning"
    """Something here gives wrong results, or none."""
    NOTE = "note"
    """Something that matters only to some: a fault in a part of a package that you may not use."""


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A known trap that is set here, with its remedy."""

    severity: Severity
    title: str
    detail: str
    remedy: str


def gather_facts() -> list[Fact]:
    """Return all facts, grouped in the order in which they are shown."""
    return [*_software(), *_accelerator(), *_host(), *_emulated_device()]


def _software() -> list[Fact]:
    facts = [
        Fact("software", "lowtide", __version__),
        Fact("software", "python", platform.python_version(), sys.executable),
    ]
    for package, tested in compat.TESTED.items():
        version = compat.installed_version(package)
        oldest, newest = compat.tested_torch() if package == "torch" else (tested, tested)
        value = "not installed" if version is None else str(version)
        facts.append(Fact("software", package, value, _tested_note(version, oldest, newest)))
    return facts


def _tested_note(version: Version | None, oldest: Version, newest: Version) -> str:
    """Say which versions are tested, unless the installed one is the only one."""
    tested = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
    if version is None:
        return f"tested with {tested}"
    public = Version(version.public)  # without what a build adds, such as +cpu
    if public > newest:
        return f"newer than what is tested: {tested}"
    return "" if oldest == newest == public else f"tested with {tested}"


def _accelerator() -> list[Fact]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return [Fact("accelerator", "device", "none", "the emulated device needs none")]
    facts = [Fact("accelerator", "device", f"{torch.accelerator.device_count()} x {device.type}", _device_name(device))]
    try:
        free, total = torch.accelerator.get_memory_info()
        facts.append(Fact("accelerator", "memory", format_bytes(total), f"{format_bytes(free)} free"))
    except (RuntimeError, NotImplementedError) as error:
        facts.append(Fact("accelerator", "memory", "not known", str(error).partition("\n")[0]))
    return [*facts, *_links(Machine())]


def _links(machine: Machine) -> Iterator[Fact]:
    if machine.nvidia_driver is not None:
        yield Fact("accelerator", "driver", machine.nvidia_driver)
    for address in accelerator_addresses():
        found = machine.pci_device(address)
        if found.width is not None:
            node = "" if found.numa_node is None else f"NUMA node {found.numa_node}"
            yield Fact("accelerator", f"PCIe {address}", found.link, node)


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


def find_hazards() -> list[Hazard]:
    """Return all hazards that are set here, the worst first."""
    found = [
        *_old_versions(),
        *_replaced_checkpoint(),
        *_machine_limits(),
        *gpu_machine_hazards(Machine()),
        *_faulty_packages(),
    ]
    return sorted(found, key=lambda hazard: list(Severity).index(hazard.severity))


def _old_versions() -> Iterator[Hazard]:
    for package, minimum in compat.MINIMUM.items():
        version = compat.installed_version(package)
        if version is None or version >= minimum:
            continue
        yield Hazard(
            Severity.ERROR if package == "torch" else Severity.WARNING,
            f"{package} {version} is too old",
            f"Lowtide supports {package} {minimum} and later.",
            f"pip install '{package}>={minimum}'",
        )


def _replaced_checkpoint() -> Iterator[Hazard]:
    module = torch.utils.checkpoint
    if _is_foreign(module.CheckpointFunction):
        yield Hazard(
            Severity.WARNING,
            f"torch.utils.checkpoint.CheckpointFunction was replaced by {_origin(module.CheckpointFunction)}",
            "Non-reentrant checkpointing never calls it, so whatever the replacement does (CPU offload, most often) "
            "silently does not happen there; transformers 5 is non-reentrant by default.",
            "use lowtide.checkpoint, or undo the patch",
        )
    for name, function in _checkpoint_functions():
        if _is_foreign(function):
            yield Hazard(
                Severity.WARNING,
                f"{name} was replaced by {_origin(function)}",
                "Every model in this process that checkpoints gets the replacement, even those that it was not made "
                "for, and a second patch would wrap the first.",
                "let only one package replace the checkpoint function in a process",
            )


def _checkpoint_functions() -> Iterator[tuple[str, Any]]:
    """Yield torch's function, and the reference to it that transformers keeps if it is imported."""
    yield "torch.utils.checkpoint.checkpoint", torch.utils.checkpoint.checkpoint
    kept = getattr(sys.modules.get("transformers.modeling_utils"), "checkpoint", None)
    if kept is not None:
        yield "transformers.modeling_utils.checkpoint", kept


def _code(thing: Any) -> CodeType | None:
    """Return the code of a function or an autograd function: functools.wraps copies names, but never code."""
    return getattr(getattr(thing, "forward", thing), "__code__", None)


def _is_foreign(thing: Any) -> bool:
    code = _code(thing)
    return code is None or not Path(code.co_filename).is_relative_to(Path(torch.__file__).parent)


def _origin(thing: Any) -> str:
    code = _code(thing)
    if code is None:
        return type(thing).__qualname__
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _machine_limits() -> Iterator[Hazard]:
    if "microsoft" in platform.release().lower():
        yield Hazard(
            Severity.WARNING,
            "WSL2 limits pinned memory",
            "The driver pins only a part of the machine's memory, and then fails.",
            "cap the host tier, or run on Linux directly",
        )
    if _keeps_freed_memory():
        yield Hazard(
            Severity.NOTE,
            "a process on the CPU seems to hold memory that it has freed",
            "There is no accelerator here, and glibc keeps freed blocks of up to 32 MiB: memory that recompute and the "
            "disk tier free does not go back to the system, and a peak of resident memory says nothing.",
            "start Python with MALLOC_MMAP_THRESHOLD_=262144 MALLOC_TRIM_THRESHOLD_=262144",
        )


def _keeps_freed_memory() -> bool:
    if torch.accelerator.is_available() or platform.libc_ver()[0] != "glibc":
        return False
    return "MALLOC_MMAP_THRESHOLD_" not in os.environ and "mmap_threshold" not in os.environ.get("GLIBC_TUNABLES", "")


_GIB = 2**30
_LITTLE_LOCKED = 2**26
"""Bytes of locked memory below which network cards cannot register the buffers of a collective."""

_OLDEST_DRIVERS = {11: Version("450"), 12: Version("525"), 13: Version("580")}
"""The oldest branch of NVIDIA's driver that runs programs made with a CUDA of this major version (NVIDIA's table of
minor version compatibility)."""

_WSL_SEGMENTS = Version("615")
"""The branch of the driver that maps expandable segments on all cards in WSL2 (pytorch/pytorch#192330)."""


def gpu_machine_hazards(machine: Machine) -> Iterator[Hazard]:
    """Yield what makes offload slow or impossible on a machine with a GPU; nothing on a machine without one."""
    addresses = accelerator_addresses()
    if not addresses:
        return
    yield from _limits_of_host_memory(machine, ranks=len(addresses))
    yield from _drivers(machine)
    for address in addresses:
        yield from _slow_link(machine, address)
        yield from _far_node(machine, address)


def _limits_of_host_memory(machine: Machine, *, ranks: int) -> Iterator[Hazard]:
    limit = machine.memory_limit
    if limit is not None:
        yield Hazard(
            Severity.WARNING,
            f"this container may use {format_bytes(limit)} of memory",
            "Pinned memory counts towards the limit, and the system kills the process that exceeds it: there is no "
            "error to see.",
            "start the container with more memory, or cap the host tier: "
            f"offload(host={max(1, limit // 2 // _GIB)}GiB)",
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if ranks > 1 and 0 <= locked < _LITTLE_LOCKED:
        yield Hazard(
            Severity.NOTE,
            f"a process may lock {format_bytes(locked)} of memory",
            "CUDA pins memory all the same, but network cards (InfiniBand, RoCE) cannot register buffers for NCCL.",
            "ulimit -l unlimited, or docker run --ulimit memlock=-1, if ranks are on several machines",
        )
    if machine.huge_pages == "never":
        yield Hazard(
            Severity.NOTE,
            "transparent huge pages are off",
            "Gigabytes of host memory are pinned page by page, in pages of 4 KiB: the first steps with offload are "
            "slower.",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _drivers(machine: Machine) -> Iterator[Hazard]:
    name, cuda = machine.nvidia_driver, torch.version.cuda
    driver = None if name is None else Version(name)
    oldest = _OLDEST_DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    if driver is not None and oldest is not None and driver < oldest:
        yield Hazard(
            Severity.ERROR,
            f"the driver {name} is too old for CUDA {cuda}",
            f"This torch is built with CUDA {cuda}, whose programs need driver {oldest} or later.",
            f"install driver {oldest} or later, or a torch that is built with an older CUDA",
        )
    expandable = allocator_settings().get("expandable_segments", "").lower() == "true"
    if expandable and machine.is_wsl and driver is not None and driver < _WSL_SEGMENTS:
        yield Hazard(
            Severity.WARNING,
            f"expandable_segments fails in WSL2 with driver {name}",
            "On some cards the driver refuses to map the allocator's segments, and torch raises \"CUDA driver error: "
            'unknown error" (pytorch/pytorch#192330).',
            f"install driver {_WSL_SEGMENTS} or later, or leave expandable_segments out of PYTORCH_ALLOC_CONF",
        )
    if not expandable and not machine.is_wsl:
        yield Hazard(
            Severity.NOTE,
            "the allocator's segments cannot grow",
            "With long or changing sequences, free memory lies in pieces that are too small, and a step runs out of "
            "memory that a plan says is there.",
            "export PYTORCH_ALLOC_CONF=expandable_segments:True",
        )


def _slow_link(machine: Machine, address: str) -> Iterator[Hazard]:
    found = machine.pci_device(address)
    if found.slot_speed is not None and found.most_speed is not None and found.slot_speed < found.most_speed:
        yield Hazard(
            Severity.NOTE,
            f"the accelerator at {address} can do {found.most_speed:g} GT/s, and its slot {found.slot_speed:g} GT/s",
            "The slot is older than the card: copies to and from the host take longer than plans say.",
            "use a newer slot, if there is one; plan with `lowtide calibrate`'s file, which has the real rate",
        )
    if found.width is None or found.most_width is None or found.width >= found.most_width:
        return  # the speed says nothing: an idle device lowers it
    yield Hazard(
        Severity.WARNING,
        f"the accelerator at {address} is linked by PCIe x{found.width} of x{found.most_width}",
        "Copies to and from the host are slower in proportion, and offload may no longer hide behind compute.",
        f"put the card into a slot that is wired as x{found.most_width}, or look for a riser in between; plan with "
        "`lowtide calibrate`'s file, which has the real rate",
    )


def _far_node(machine: Machine, address: str) -> Iterator[Hazard]:
    found = machine.pci_device(address)
    mine = _affinity()
    if found.numa_node is None or not found.local_cpus or mine <= found.local_cpus:
        return
    away = mine.isdisjoint(found.local_cpus)
    yield Hazard(
        Severity.WARNING if away else Severity.NOTE,
        f"this process {'runs' if away else 'may run'} on another NUMA node than the accelerator at {address}",
        "Pinned memory lies where the process runs when it is pinned; copies from another node also cross the link "
        "between the processors.",
        f"start each rank with numactl --cpunodebind={found.numa_node} --membind={found.numa_node}",
    )


def _affinity() -> frozenset[int]:
    """Return the processors that this process may run on."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


@dataclasses.dataclass(frozen=True)
class _Fault:
    """A fault in some versions of a package."""

    package: str
    versions: SpecifierSet
    title: str
    detail: str
    remedy: str


_FAULTS = (
    _Fault(
        "accelerate",
        SpecifierSet("<=1.15.0"),
        "FSDP2 activation checkpointing does not keep the random state",
        "It passes preserve_rng_state=False: with dropout, the recomputed forward draws a different mask and the "
        "gradients are wrong, with no error.",
        "leave fsdp_activation_checkpointing off when the model has dropout (LoRA dropout included)",
    ),
    _Fault(
        "trl",
        SpecifierSet("<=1.16.0"),
        "activation_offloading keeps one tracker per process",
        "Two forwards before a backward, and retain_graph, fail.",
        "use it only with one forward per backward",
    ),
    _Fault(
        "deepspeed",
        SpecifierSet("<=0.19.8"),
        "TiledFusedLogitsLoss does not scale the head's gradient",
        "Backward multiplies the hidden states' gradient by the incoming gradient, but not the head's: a division by "
        "tokens, gradient accumulation and a GradScaler do not reach the head.",
        "do not train the head with it",
    ),
    _Fault(
        "axolotl",
        SpecifierSet("<0.20"),
        "activation_offloading: disk goes to the CPU",
        "The setting is accepted, but the activations stay in host memory.",
        "use Lowtide's plugin with 'lowtide: recompute+offload(disk=/scratch)'",
    ),
)


def _faulty_packages() -> Iterator[Hazard]:
    for fault in _FAULTS:
        version = compat.installed_version(fault.package)
        if version is not None and version in fault.versions:
            yield Hazard(Severity.NOTE, f"{fault.package} {version}: {fault.title}", fault.detail, fault.remedy)
