"""Lowtide keeps the activation memory of PyTorch training low, and proves that the gradients are still right.

Importing this package does nothing else: no patches, no environment, no compilation. Everything that acts is a function
that you call.
"""

from __future__ import annotations

import logging

from lowtide import simdevice
from lowtide._version import __version__
from lowtide.applying import Applied, apply
from lowtide.auditing import AuditReport, audit
from lowtide.checkpointing import Schedule, checkpoint, offload
from lowtide.errors import LowtideError
from lowtide.losses import linear_cross_entropy
from lowtide.policy import Policy
from lowtide.stores import HostStore
from lowtide.tiling import tile
from lowtide.torch_patch import patch_torch

__all__ = [
    "Applied",
    "AuditReport",
    "HostStore",
    "LowtideError",
    "Policy",
    "Schedule",
    "__version__",
    "apply",
    "audit",
    "checkpoint",
    "linear_cross_entropy",
    "offload",
    "patch_torch",
    "simdevice",
    "tile",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
