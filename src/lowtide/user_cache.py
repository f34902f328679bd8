"""Where Lowtide keeps what it need not make again: compiled libraries, figures of plans."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The user's cache directory for Lowtide. `LOWTIDE_CACHE` moves all of it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"
    return Path(os.environ.get("LOWTIDE_CACHE") or default)
