"""Where saved bytes live: on the device, in pinned host memory, in files, or in both."""

from __future__ import annotations

from lowtide.stores.base import DiskUsage, Store, Stored, Usage
from lowtide.stores.choice import store_for
from lowtide.stores.disk import DiskStore
from lowtide.stores.host import HostStore
from lowtide.stores.tiered import TieredStore

__all__ = ["DiskStore", "DiskUsage", "HostStore", "Store", "Stored", "TieredStore", "Usage", "store_for"]
