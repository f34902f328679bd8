"""Where saved bytes live: on the device, in pinned host memory, or (later) in files."""

from __future__ import annotations

from lowtide.stores.base import Store, Stored
from lowtide.stores.host import HostStore

__all__ = ["HostStore", "Store", "Stored"]
