"""Checkpoint with offload: the function, and the machinery that `apply` shares with it."""

from __future__ import annotations

from lowtide.checkpointing.checkpoint import checkpoint
from lowtide.checkpointing.offload import offload
from lowtide.checkpointing.schedule import Schedule

__all__ = ["Schedule", "checkpoint", "offload"]
