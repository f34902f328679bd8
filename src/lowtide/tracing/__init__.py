"""`lowtide.trace`: what a real training step holds in memory, byte by byte and region by region, to look at."""

from __future__ import annotations

from lowtide.tracing.recorder import trace
from lowtide.tracing.result import Trace

__all__ = ["Trace", "trace"]
