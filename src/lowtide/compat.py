"""Versions: what Lowtide is tested with, and the shims for what differs between versions and what has no public name.

A shim lives here and nowhere else. It names what it covers, and the version from which it can go if there is one.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from packaging.version import Version

MINIMUM = {
    "torch": Version("2.10"),
    "transformers": Version("4.57"),
    "accelerate": Version("1.10"),
    "peft": Version("0.17"),
    "trl": Version("0.23"),
    "deepspeed": Version("0.18"),
}
"""The oldest versions that the package's metadata admits."""

TESTED = {
    "torch": Version("2.13.0"),
    "transformers": Version("5.22.2"),
    "accelerate": Version("1.15.0"),
    "peft": Version("0.21.2"),
    "trl": Version("1.16.0"),
    "deepspeed": Version("0.19.8"),
}
"""The versions that the tests run with (`constraints.txt` pins the same)."""


def installed_version(package: str) -> Version | None:
    """The version of an installed package, read from its metadata: nothing is imported."""
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def recorded_outputs() -> dict[str, Any]:
    """The lists that transformers' hooks append outputs to while a forward runs (5.0 and later); it has no public name.

    Empty if none runs, or transformers is not loaded.
    """
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return (collector.get() if collector is not None else None) or {}
