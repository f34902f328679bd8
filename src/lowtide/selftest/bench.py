"""Holds what every stage needs to know of the device under test: its data sheet, its sizes of work, a place for files.

The emulated device is slow, so its work is small. Its rates are set so that small work behaves as large work does on a
real device: kernels are not bound by their launches, and a layer's kernels take several times as long as the copy of
its input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowtide import simdevice
from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import Accelerator, Efficiencies, this_accelerator
from lowtide.hardware.calibration import Probe
from lowtide.targets.job import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

DEVICES = ("cuda", "xpu", "npu", "mps", "sim", "cpu")

EMULATED: dict[str, Any] = {
    "memory": 2 * 2**30,
    "flops": 1e10,
    "bandwidth": 2e9,
    "h2d": 1e8,
    "d2h": 1e8,
    "launch": 5e-6,
    "on_violation": "record",
}
"""The emulated device's settings during a self-test, which are its data sheet, too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The sizes of the model that stages measure, and how often they repeat."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    tokens: int
    vocabulary: int
    dtype: str
    rounds: int
    """Steps of each policy that are timed."""
    stresses: int
    """Steps under stress."""
    probe: Probe
    disk_bytes: int

    @property
    def tile(self) -> int:
        """The tokens of a tile: few enough to save memory, and enough to keep a device busy."""
        return self.tokens // 4

    @property
    def width(self) -> int:
        """The bytes of a number."""
        return DTYPES[self.dtype].itemsize


def read_work(text: str) -> Work:
    """Return the work that was written as JSON."""
    fields = json.loads(text)
    return Work(**{**fields, "probe": Probe(**fields["probe"])})


_SMALL = Work(
    hidden=128,
    layers=6,
    heads=4,
    key_value_heads=2,
    tokens=512,
    vocabulary=512,
    dtype="fp32",
    rounds=5,
    stresses=12,
    probe=Probe(matrix=512, sequence=512, heads=2, width=64, copy=2**23, repeats=5),
    disk_bytes=64 * 2**20,
)
_LARGE = Work(
    hidden=2048,
    layers=8,
    heads=16,
    key_value_heads=8,
    tokens=8192,
    vocabulary=32000,
    dtype="bf16",
    rounds=11,
    stresses=24,
    probe=Probe(),
    disk_bytes=1024 * 2**20,
)
_WITHOUT_FLASH = dataclasses.replace(
    _LARGE,
    hidden=1024,
    heads=8,
    key_value_heads=8,
    tokens=2048,
    dtype="fp16",
    rounds=5,
    stresses=12,
    probe=Probe(matrix=4096, sequence=2048, heads=8, width=128, copy=64 * 2**20, repeats=10),
    disk_bytes=256 * 2**20,
)
"""For cards before NVIDIA's Ampere: they have no bf16, and their attention holds all scores, for grouped heads even
where a fused kernel would not."""

_ENOUGH = 20 * 2**30
"""Free bytes of a device on which the large model fits."""

_AMPERE = (8, 0)


@dataclasses.dataclass
class Limits:
    """What ends a stage before its last row."""

    deadline: float = math.inf
    """When the stage's time is up, by `time.monotonic`."""
    lost: str = ""
    """Why the device no longer answers, if it does not."""

    @property
    def reached(self) -> str:
        """Why nothing more may begin; empty if it may."""
        if self.lost:
            return "the device no longer answers"
        return "time" if time.monotonic() > self.deadline else ""

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """One device, ready to be tested."""

    device: torch.device
    sheet: Accelerator | None
    """The device's data sheet; None if the table does not have it."""
    why_no_sheet: str
    quick: bool
    work: Work
    folder: Path
    """A directory for files, which is removed at the end."""
    ranks: int
    has_flash: bool
    """Whether the device has flash attention, and bf16 with it."""
    counts_peaks: bool
    """Whether the device's allocator, or the profiler in its place, counts the most bytes at once."""
    show: Callable[[str], None]
    """Tells the progress bar what is being done."""
    limits: Limits = dataclasses.field(default_factory=Limits)

    @property
    def is_emulated(self) -> bool:
        return self.device.type == "sim"

    @property
    def has_streams(self) -> bool:
        """Whether copies can run beside kernels: not on the CPU, and not on Apple's GPUs, which share its memory."""
        return self.device.type not in ("cpu", "mps")

    @property
    def half(self) -> str:
        """The numbers of two bytes that the device computes with."""
        return "bf16" if self.has_flash else "fp16"

    def offload(self, policy: str) -> str:
        """Return a policy in which offload goes where this device can offload to: on the CPU, to disk."""
        return policy if self.has_streams else policy.replace("offload", f"offload(disk={self.folder})")

    def tiled(self, policies: Iterable[str]) -> list[str]:
        """Return the policies with this work's tiles in the place of `{tile}`."""
        return [policy.format(tile=self.work.tile) for policy in policies]


@contextlib.contextmanager
def open_bench(
    name: str | None, *, quick: bool = False, ranks: int = 1, show: Callable[[str], None] = lambda _: None
) -> Iterator[Bench]:
    """Prepare a device for the self-test; afterwards its files are gone and its unused memory is given back."""
    device = find_device(name)
    if device.type == "sim":
        simdevice.enable(**EMULATED)
        simdevice.reset()
    sheet, why = _data_sheet(device)
    has_flash = _has_flash(device, sheet)
    with tempfile.TemporaryDirectory(prefix="lowtide-selftest-") as folder:
        try:
            yield Bench(
                device=device,
                sheet=sheet,
                why_no_sheet=why,
                quick=quick,
                work=_work_for(device, has_flash=has_flash, free=_free_memory(device), quick=quick),
                has_flash=has_flash,
                counts_peaks=_counts_peaks(device),
                folder=Path(folder),
                ranks=ranks,
                show=show,
            )
        finally:
            give_back(device)  # what it says of a lost device is in the record already


def find_device(name: str | None) -> torch.device:
    """Return the device that is named, or this machine's accelerator; refuse one that is not there."""
    if name is not None and name not in DEVICES:
        raise InvalidValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    if name in ("cpu", "sim"):
        return torch.device("cpu") if name == "cpu" else _emulated()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or name not in (None, found.type):
        here = "has no accelerator" if found is None else f"has {found.type}"
        asked = "" if name is None else f", not {name}"
        raise InvalidValueError(
            f"this machine {here}{asked}: `--device sim` tests the emulated device, `--device cpu` the CPU"
        )
    return torch.device(found.type, torch.accelerator.current_device_index())


def _emulated() -> torch.device:
    simdevice.enable()
    return torch.device("sim")


def _data_sheet(device: torch.device) -> tuple[Accelerator | None, str]:
    if device.type == "sim":
        return emulated_sheet(), ""
    if device.type != "cuda":
        return None, f"the table of accelerators has no data sheets of devices of type {device.type}"
    try:
        return this_accelerator(), ""
    except InvalidValueError as error:
        return None, str(error)


def emulated_sheet() -> Accelerator:
    """Return the emulated device's data sheet, whose figures its kernels reach."""
    return Accelerator(
        name="Lowtide emulated accelerator",
        memory=EMULATED["memory"],
        half_flops=EMULATED["flops"],
        single_flops=EMULATED["flops"],
        bandwidth=EMULATED["bandwidth"],
        link=EMULATED["h2d"],
        network=EMULATED["h2d"],
        source="docs/emulated-device.md",
        blas_workspace=0,  # its kernels are the CPU's
        efficiencies=Efficiencies(matmul=1, attention=1, attention_backward=1, memory=1, link=1),
    )


def give_back(device: torch.device) -> str:
    """Give unused memory of the device back to the system; return why the device no longer answers, or nothing."""
    if device.type == "cpu":
        return ""
    module = torch.get_device_module(device)  # torch.accelerator refuses backends without a DeviceAllocator
    try:
        torch.accelerator.synchronize(device)
        if hasattr(module, "empty_cache"):
            module.empty_cache()
    except RuntimeError as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def _has_flash(device: torch.device, sheet: Accelerator | None) -> bool:
    if sheet is not None:
        return sheet.has_flash
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _AMPERE
    return True


def _free_memory(device: torch.device) -> int:
    """Return the bytes that are free on the device; 0 if its backend does not tell."""
    if device.type == "cpu":
        return 0
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (RuntimeError, NotImplementedError):
        return 0


def _counts_peaks(device: torch.device) -> bool:
    if device.type in ("cpu", "mps"):
        return device.type == "cpu"
    try:
        torch.accelerator.max_memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # a backend without a DeviceAllocator
        return False
    return True


def _work_for(device: torch.device, *, has_flash: bool, free: int, quick: bool) -> Work:
    if device.type in ("sim", "cpu"):
        small = dataclasses.replace(_SMALL, layers=4, tokens=256, rounds=1, stresses=3, disk_bytes=16 * 2**20)
        return small if quick else _SMALL
    if not has_flash:
        return dataclasses.replace(_WITHOUT_FLASH, layers=4, rounds=3, stresses=8) if quick else _WITHOUT_FLASH
    if quick or free < _ENOUGH:
        return dataclasses.replace(
            _LARGE,
            hidden=1024,
            heads=8,
            key_value_heads=4,
            tokens=4096,
            rounds=5,
            stresses=8,
            disk_bytes=256 * 2**20,
        )
    return _LARGE
