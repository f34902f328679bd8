"""Checkpointing with offload: the public functions, and the engine that `apply` shares with them."""

from __future__ import annotations

from lowtide.checkpointing.checkpoint import checkpoint
from lowtide.checkpointing.offload import offload
from lowtide.checkpointing.schedule import Schedule

__all__ = ["Schedule", "checkpoint", "offload"]
