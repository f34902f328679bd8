"""Finds the directory in which Lowtide caches what is slow to make: the compiled device, results of plans."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the user's cache directory for Lowtide. `LOWTIDE_CACHE` moves all of it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"
    return Path(os.environ.get("LOWTIDE_CACHE") or default)
