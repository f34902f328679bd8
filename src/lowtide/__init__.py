"""Lowtide keeps the activation memory of PyTorch training low, and proves that the gradients are still right.

Importing this package does nothing else: no patches, no environment, no compilation. Everything that acts is a function
that you call. What a name needs is imported when the name is first used (PEP 562), so that `import lowtide` costs next
to nothing, and a program that only plans never loads the engine.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from lowtide._version import __version__

if TYPE_CHECKING:
    from lowtide import simdevice
    from lowtide._api import apply
    from lowtide.applying import Applied
    from lowtide.auditing import AuditReport, audit
    from lowtide.checkpointing import Schedule, checkpoint, offload
    from lowtide.errors import LowtideError
    from lowtide.losses import linear_cross_entropy, linear_log_probs
    from lowtide.planning import Plan, plan
    from lowtide.policy import Policy
    from lowtide.stores import DiskStore, HostStore
    from lowtide.tiling import tile
    from lowtide.torch_patch import patch_torch
    from lowtide.tracing import Trace, trace

__all__ = [
    "Applied",
    "AuditReport",
    "DiskStore",
    "HostStore",
    "LowtideError",
    "Plan",
    "Policy",
    "Schedule",
    "Trace",
    "__version__",
    "apply",
    "audit",
    "checkpoint",
    "linear_cross_entropy",
    "linear_log_probs",
    "offload",
    "patch_torch",
    "plan",
    "simdevice",
    "tile",
    "trace",
]

_HOMES = {
    "Applied": "applying",
    "AuditReport": "auditing",
    "DiskStore": "stores",
    "HostStore": "stores",
    "LowtideError": "errors",
    "Policy": "policy",
    "Schedule": "checkpointing",
    "Plan": "planning",
    "Trace": "tracing",
    "apply": "_api",
    "audit": "auditing",
    "checkpoint": "checkpointing",
    "linear_cross_entropy": "losses",
    "linear_log_probs": "losses",
    "offload": "checkpointing",
    "patch_torch": "torch_patch",
    "plan": "planning",
    "tile": "tiling",
    "trace": "tracing",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


if not TYPE_CHECKING:  # a type checker sees exactly the names above, so that a misspelt one is an error there, too

    def __getattr__(name: str) -> object:
        if name == "simdevice":
            return importlib.import_module("lowtide.simdevice")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
