"""The emulated accelerator: a `torch.device("sim")` with small, strict, deterministic hardware behind it.

`enable()` builds the device (C++, once per torch version) and registers it with torch. From then on `"sim"` works
everywhere a device does: `tensor.to("sim")`, `torch.Stream(device="sim")`, `torch.accelerator`, autocast, DDP. The
arithmetic is the CPU's, bit for bit. What is emulated is everything around it: a hard memory cap, poisoned memory,
pinned memory with lazy copies, streams, a race detector and a virtual clock. So "fits or not", "a wait is missing" and
"the copy overlaps" become facts that a test can check on a machine without a GPU.

A device stays registered until the process ends: torch cannot unregister one. There is one device per process.
"""

from __future__ import annotations

from lowtide.simdevice._api import (
    Settings,
    Span,
    Stats,
    Violation,
    enable,
    is_enabled,
    reset,
    stats,
    timeline,
    violations,
)
from lowtide.simdevice._build import Toolchain, toolchain

__all__ = [
    "Settings",
    "Span",
    "Stats",
    "Toolchain",
    "Violation",
    "enable",
    "is_enabled",
    "reset",
    "stats",
    "timeline",
    "toolchain",
    "violations",
]
