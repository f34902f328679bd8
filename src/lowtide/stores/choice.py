"""The store that a policy asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.errors import InvalidValueError
from lowtide.stores.disk import DiskStore
from lowtide.stores.host import HostStore
from lowtide.stores.tiered import TieredStore

if TYPE_CHECKING:
    from lowtide.policy import Policy
    from lowtide.stores.base import Store


def store_for(policy: Policy) -> Store:
    """Host, disk, or host first and disk past its limit. A policy's rules share the store."""
    if policy.disk is None:
        if policy.offload == "disk":
            raise InvalidValueError(
                f"policy {policy.describe()!r} offloads to a disk and does not say where: name a directory on a local "
                "disk, like offload(disk=/scratch)"
            )
        return HostStore(policy.host_limit)
    disk = DiskStore(policy.disk, limit=policy.disk_limit, verify=policy.verify, tmpfs=policy.tmpfs)
    return disk if policy.offload == "disk" else TieredStore(HostStore(policy.host_limit), disk)
