"""What a result came from: versions, the machine, and how busy it was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "deepspeed",
    "liger-kernel",
    "unsloth_zoo",
    "axolotl",
    "arctic-training",
)


def environment() -> dict[str, Any]:
    """Return versions and machine of this process. The load covers the last minute, the section's start included."""
    return {
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
