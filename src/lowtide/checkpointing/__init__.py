"""Checkpoint with offload: the function, and the machinery that `apply` shares with it."""

from __future__ import annotations

from lowtide.checkpointing.core import checkpoint
from lowtide.checkpointing.offloading import offload
from lowtide.checkpointing.saving import Schedule

__all__ = ["Schedule", "checkpoint", "offload"]
