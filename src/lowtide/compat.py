"""Names the versions that Lowtide is tested with, and holds the shims for what differs between versions.

Every shim stands in this file. It names what it covers and, where there is one, the version from which on it can go.
Torch's private names are behind verbs in `_torch`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from packaging.version import Version

MINIMUM = {
    "torch": Version("2.12"),
    "transformers": Version("4.57"),
    "accelerate": Version("1.10"),
    "peft": Version("0.17"),
    "trl": Version("0.23"),
    "deepspeed": Version("0.18"),
}
"""The oldest versions that the package's metadata allows."""

TESTED = {
    "torch": Version("2.13.0"),
    "transformers": Version("5.22.2"),
    "accelerate": Version("1.15.0"),
    "peft": Version("0.21.2"),
    "trl": Version("1.16.0"),
    "deepspeed": Version("0.19.8"),
}
"""The versions that the tests run with (`constraints.txt` pins the same)."""

_TESTED_TORCH = (Version("2.12.1"), Version("2.15.0"))


def tested_torch() -> tuple[Version, Version]:
    """Return the oldest and the newest torch that the engine is tested with."""
    return _TESTED_TORCH


def installed_version(package: str) -> Version | None:
    """Return the version of an installed package from its metadata, without importing it; None if it is not there."""
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def recorded_outputs() -> dict[str, Any]:
    """Return the lists that transformers' hooks append outputs to while a forward runs (5.0 and later).

    They are empty if no forward runs or transformers is not loaded. There is no public name for them.
    """
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return (collector.get() if collector is not None else None) or {}
