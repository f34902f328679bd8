"""Two tiers: host memory up to its limit, and the disk beyond it; and the choice of a store for a policy.

Every tensor goes to the host first. When the host is full, the tensor that has been there longest is spilled to the
disk: it was saved first, so backward needs it last. So the disk gets as many bytes as if it had taken whatever did not
fit, and what backward needs first is nearest. Room for the next tensor is made while the present one's region computes.

A tensor leaves the host only when it is written: a disk that fails costs the step, and no wrong gradient.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING

from lowtide.errors import InvalidValueError
from lowtide.stores.base import Store, Stored, Usage
from lowtide.stores.disk import DiskStore, DiskStored
from lowtide.stores.host import HostStore, HostStored

if TYPE_CHECKING:
    import torch

    from lowtide.policy import Policy


class TieredStore(Store):
    """A `host` store, which must have a limit, and a `disk` store for what does not fit."""

    name = "host and disk"

    def __init__(self, host: HostStore, disk: DiskStore) -> None:
        if host.limit is None:
            raise InvalidValueError(
                "a host store without a limit never spills anything to the disk: give it a limit, like "
                "offload(host=8GiB, disk=/scratch), or leave the host out: offload(disk=/scratch)"
            )
        self.host, self.disk = host, disk
        self._limit = host.limit
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._on_host: weakref.WeakValueDictionary[int, _TieredStored] = weakref.WeakValueDictionary()

    def require_useful(self, tensor: torch.Tensor, region: str) -> None:
        self.host.require_useful(tensor, region)

    def put(self, raw: torch.Tensor) -> Stored:
        return _TieredStored(self, raw)

    @property
    def bytes_used(self) -> int:
        return self.host.bytes_used + self.disk.bytes_used

    @property
    def peak_bytes(self) -> int:
        """Return the sum of both peaks, which need not have occurred at the same time."""
        return self.host.peak_bytes + self.disk.peak_bytes

    @property
    def seconds_waited(self) -> float:
        return self.host.seconds_waited + self.disk.seconds_waited

    def usage(self) -> Usage:
        host, disk = self.host.usage(), self.disk.usage()
        return Usage(
            host_bytes=host.host_bytes + disk.host_bytes,
            peak_host_bytes=host.peak_host_bytes + disk.peak_host_bytes,
            pageable_bytes=host.pageable_bytes + disk.pageable_bytes,
            seconds_waited=host.seconds_waited + disk.seconds_waited,
            disk=disk.disk,
        )

    def add_to_host(self, stored: _TieredStored) -> None:
        """Note a tensor that found room on the host. If the next of its size would not, begin to spill the oldest."""
        with self._lock:
            self._on_host[next(self._numbers)] = stored
            if self._limit - self.host.bytes_used < stored.nbytes and (oldest := self._oldest()) is not None:
                oldest.start_spill()

    def make_room(self) -> bool:
        """Spill the oldest tensor on the host. Return False if there is none, or no room on the disk either."""
        with self._lock:
            oldest = self._oldest()
            return oldest is not None and oldest.spill()

    def _oldest(self) -> _TieredStored | None:
        for number, stored in self._on_host.items():
            if stored.is_spilled:
                self._on_host.pop(number)
                return self._oldest()
            if stored.is_away:
                return stored
        return None


class _TieredStored(Stored):
    """One tensor of a tiered store: on the host, being spilled while it is still on the host, or on the disk."""

    def __init__(self, store: TieredStore, raw: torch.Tensor) -> None:
        self._store = store
        self._lock = threading.Lock()  # the host's memory must not be freed while another thread reads it
        self._host: HostStored | None = HostStored(store.host, raw)
        self._disk: DiskStored | None = None
        self._raw: torch.Tensor | None = raw
        self._dtype, self._device = raw.dtype, raw.device
        self._fetched = 0
        self.nbytes = raw.nbytes

    @property
    def is_spilled(self) -> bool:
        """Return whether only the disk holds the bytes."""
        return self._host is None

    @property
    def _tier(self) -> Stored:
        return self._host or self._disk  # type: ignore[return-value]  # it is always in one of them

    @property
    def is_away(self) -> bool:
        return self._tier.is_away

    def start(self) -> bool:
        if self._raw is None or self._host is None:
            return True
        while not self._host.start():
            if not self._store.make_room():
                return self._start_on_disk(self._raw)
        self._raw = None
        self._store.add_to_host(self)
        return True

    def _start_on_disk(self, raw: torch.Tensor) -> bool:
        """Skip the host: the tensor is larger than its limit, or everything there is still being copied to it."""
        disk = DiskStored(self._store.disk, self.nbytes, self._dtype, self._device, raw)
        if not disk.start():
            return False
        self._disk, self._host, self._raw = disk, None, None
        return True

    def start_spill(self) -> bool:
        """Begin to write the tensor to the disk. Return False if there is no room, or if it is there already."""
        if self._disk is None and self._host is not None:
            disk = DiskStored(self._store.disk, self.nbytes, self._dtype, self._device, None)
            if disk.write(*self._host.host_tensors()):
                self._disk = disk
        return self._disk is not None and self._host is not None

    def spill(self) -> bool:
        """Move the tensor to the disk, and free its host memory. Return False if there is no room."""
        if not self.start_spill() or self._disk is None:
            return False
        try:
            self._disk.wait_until_written()
        except Exception:
            self._disk = None  # the host still has it
            raise
        with self._lock:
            host, self._host = self._host, None
        if host is not None:
            host.free_host_memory()
        return True

    def release(self) -> None:
        self._tier.release()

    def prefetch(self) -> None:
        with self._lock:
            self._tier.prefetch()

    def get(self) -> torch.Tensor:
        with self._lock:
            if self._host is not None:
                return self._get_from(self._host)
        return self._get_from(self._tier)

    def _get_from(self, tier: Stored) -> torch.Tensor:
        raw = tier.get()
        self._fetched += tier.take_fetched()
        return raw

    def take_fetched(self) -> int:
        fetched, self._fetched = self._fetched, 0
        return fetched


def store_for(policy: Policy) -> Store:
    """Return a new store of the tiers that a policy names. All rules of the policy share it."""
    if policy.disk is None:
        if policy.offload == "disk":
            raise InvalidValueError(
                f"policy {policy.describe()!r} offloads to a disk but does not say where: name a directory on a local "
                "disk, like offload(disk=/scratch)"
            )
        return HostStore(policy.host_limit)
    disk = DiskStore(policy.disk, limit=policy.disk_limit, verify=policy.verify, tmpfs=policy.tmpfs)
    return disk if policy.offload == "disk" else TieredStore(HostStore(policy.host_limit), disk)
