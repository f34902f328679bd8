"""The places where saved tensors wait for backward: pinned host memory, files, or both."""

from __future__ import annotations

from lowtide.stores.base import DiskUsage, Store, Stored, Usage
from lowtide.stores.disk import DiskStore
from lowtide.stores.host import HostStore
from lowtide.stores.tiered import TieredStore, store_for

__all__ = ["DiskStore", "DiskUsage", "HostStore", "Store", "Stored", "TieredStore", "Usage", "store_for"]
