"""`lowtide.trace`: records what a real training step holds in memory, byte by byte and region by region."""

from __future__ import annotations

from lowtide.tracing.recorder import trace
from lowtide.tracing.result import Trace

__all__ = ["Trace", "trace"]
