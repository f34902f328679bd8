"""The public functions. The device itself is C++ (`csrc/`); this module sets it up and reads its figures."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

from lowtide.errors import InvalidValueError, SimDeviceError
from lowtide.simdevice import _build, _registration
from lowtide.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

OnViolation = Literal["record", "raise"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The device's hardware. The rates are round figures for a small accelerator, not taken from any product."""

    memory: int = 512 * 1024**2
    """Capacity in bytes."""
    flops: float = 100e12
    """Floating-point operations per second."""
    bandwidth: float = 1e12
    """Device memory, bytes per second."""
    h2d: float = 25e9
    """Link from host to device, bytes per second."""
    d2h: float = 25e9
    """Link from device to host, bytes per second."""
    launch: float = 5e-6
    """Host seconds per kernel or copy."""
    on_violation: OnViolation = "record"
    """What to do when the program breaks a rule: keep a record, or raise `DeviceViolationError`."""

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "h2d", "d2h"):
            rate = getattr(self, name)
            if not rate > 0:  # also refuses NaN
                raise InvalidValueError(f"{name} must be a positive rate per second, got {rate!r}")
        if not (self.launch >= 0 and math.isfinite(self.launch)):
            raise InvalidValueError(f"launch must be a time in seconds, zero or more, got {self.launch!r}")
        if self.memory <= 0:
            raise InvalidValueError(f"memory must be positive, got {self.memory!r}")
        if self.on_violation not in ("record", "raise"):
            raise InvalidValueError(f'on_violation must be "record" or "raise", got {self.on_violation!r}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """The device's figures since the last `reset()`; live bytes count whenever they were allocated."""

    live_bytes: int
    """Device bytes in use, rounded to 512 per block as CUDA's allocator does."""
    peak_bytes: int
    pinned_bytes: int
    """Pinned host bytes in use, rounded to powers of two per block as torch's host allocator does."""
    peak_pinned_bytes: int
    time: float
    """Virtual seconds until everything submitted so far is done."""
    busy_compute: float
    busy_h2d: float
    busy_d2h: float
    kernels: int
    copies: int
    """Copies between host and device."""
    h2d_bytes: int
    d2h_bytes: int
    flops: float
    ooms: int
    """Allocations that were refused."""


@dataclasses.dataclass(frozen=True)
class Violation:
    """One broken rule. Prints as one line."""

    kind: str
    """`read-race`, `write-race`, `use-after-free`, `host-read` or `host-write`."""
    op: str
    stream: int
    """The stream of `op`; -1 is the host."""
    other_op: str
    other_stream: int
    bytes: int
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Span:
    """A kernel, or a copy between host and device, as the virtual clock placed it."""

    kind: Literal["kernel", "h2d", "d2h"]
    stream: int
    begin: float
    """Virtual seconds since the last `reset()`."""
    end: float
    pinned: bool
    """Whether it is a copy from or to pinned memory."""


def enable(
    *,
    memory: int | str | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    h2d: float | None = None,
    d2h: float | None = None,
    launch: float | None = None,
    on_violation: OnViolation | None = None,
) -> Settings:
    """Register the `sim` device with torch, or change its settings; return the settings in force.

    Call it before the first backward of the process: torch starts its backward threads then, for the devices it knows.
    The first call compiles the device unless this torch version has one in the cache, and starts from the defaults of
    `Settings`. Later calls change what they name and leave the rest. `memory` takes bytes or a string like `"512MiB"`.
    """
    given: dict[str, Any] = {
        "memory": None if memory is None else parse_bytes(memory),
        "flops": flops,
        "bandwidth": bandwidth,
        "h2d": h2d,
        "d2h": d2h,
        "launch": launch,
        "on_violation": on_violation,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    library = _build.loaded()
    settings = dataclasses.replace(_settings_of(library) if library else Settings(), **changes)
    if library is None:
        library = _registration.register()
    rates = dataclasses.asdict(settings)
    library.configure(raise_on_violation=rates.pop("on_violation") == "raise", **rates)
    return settings


def is_enabled() -> bool:
    """Return whether `enable()` has been called in this process."""
    return _build.loaded() is not None


def stats() -> Stats:
    """Return the device's figures now, without waiting for the device."""
    return Stats(**_build.library().stats())


@contextlib.contextmanager
def timeline() -> Iterator[list[Span]]:
    """Record the kernels and copies that are submitted inside, in that order. The list is filled at the end."""
    library = _build.library()
    if library.is_recording():
        raise SimDeviceError("the device's timeline is being recorded already: one recording must end before the next")
    spans: list[Span] = []
    library.start_timeline()
    try:
        yield spans
    finally:
        spans += [Span(*span) for span in library.stop_timeline()]


def reset() -> None:
    """Wait for the device, then set clock, counters and peaks to zero and forget the violations."""
    _build.library().reset()


def violations() -> list[Violation]:
    """Return the rules that were broken since the last `reset()`, in order."""
    return [Violation(*record) for record in _build.library().violations()]


def _settings_of(library: ModuleType) -> Settings:
    values = library.settings()
    on_violation: OnViolation = "raise" if values.pop("raise_on_violation") else "record"
    return Settings(**values, on_violation=on_violation)
