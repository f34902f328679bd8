"""Where saved bytes live: on the device, in pinned host memory, in files, or in both."""

from __future__ import annotations

from lowtide.stores.base import DiskUsage, Store, Stored, Usage
from lowtide.stores.disk import DiskStore
from lowtide.stores.host import HostStore
from lowtide.stores.tiered import TieredStore, store_for

__all__ = ["DiskStore", "DiskUsage", "HostStore", "Store", "Stored", "TieredStore", "Usage", "store_for"]
