"""Two tiers: host memory up to its limit, and the disk past it.

Every tensor goes to the host first. When the host is full, the tensor that has been there longest moves on to the disk:
it was saved first, so backward needs it last. So the disk gets as many bytes as if it had taken whatever did not
fit, and what is needed first is nearest. Room for the next tensor is made while the present one's region computes.

A tensor leaves the host only when it is written: a disk that fails costs the step and no gradient.

The store that a policy asks for.
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
    """`host`, which must have a limit, and `disk` for what does not fit."""

    name = "host and disk"

    def __init__(self, host: HostStore, disk: DiskStore) -> None:
        if host.limit is None:
            raise InvalidValueError(
                "a host store without a limit never hands anything on to the disk: give it one, like "
                "offload(host=8GiB, disk=/scratch), or leave it out: offload(disk=/scratch)"
            )
        self.host, self.disk = host, disk
        self._limit = host.limit
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._near: weakref.WeakValueDictionary[int, _TieredStored] = weakref.WeakValueDictionary()

    def require_useful(self, tensor: torch.Tensor) -> None:
        self.host.require_useful(tensor)

    def put(self, raw: torch.Tensor) -> Stored:
        return _TieredStored(self, raw)

    @property
    def bytes_used(self) -> int:
        return self.host.bytes_used + self.disk.bytes_used

    @property
    def peak_bytes(self) -> int:
        """The sum of both peaks, which need not have come at the same time."""
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

    def arrived(self, stored: _TieredStored) -> None:
        """A tensor found room on the host. If the next one of its size would not, room is made from now on."""
        with self._lock:
            self._near[next(self._numbers)] = stored
            if self._limit - self.host.bytes_used < stored.nbytes and (oldest := self._oldest()) is not None:
                oldest.begin_to_move_on()

    def make_room(self) -> bool:
        """The oldest tensor on the host has moved on to the disk; False if there is none, or no room there either."""
        with self._lock:
            oldest = self._oldest()
            return oldest is not None and oldest.move_on()

    def _oldest(self) -> _TieredStored | None:
        for number, stored in self._near.items():
            if stored.has_moved_on:
                self._near.pop(number)
                return self._oldest()
            if stored.is_away:
                return stored
        return None


class _TieredStored(Stored):
    """On the host, on its way to the disk while it is still on the host, or on the disk."""

    def __init__(self, store: TieredStore, raw: torch.Tensor) -> None:
        self._store = store
        self._lock = threading.Lock()  # a thread that reads must not find the host's memory given back under it
        self._near: HostStored | None = HostStored(store.host, raw)
        self._far: DiskStored | None = None
        self._raw: torch.Tensor | None = raw
        self._dtype, self._device = raw.dtype, raw.device
        self._fetched = 0
        self.nbytes = raw.nbytes

    @property
    def has_moved_on(self) -> bool:
        return self._near is None

    @property
    def _place(self) -> Stored:
        return self._near or self._far  # type: ignore[return-value]  # it is always in one of them

    @property
    def is_away(self) -> bool:
        return self._place.is_away

    def start(self) -> bool:
        if self._raw is None or self._near is None:
            return True
        while not self._near.start():
            if not self._store.make_room():
                return self._straight_to_disk(self._raw)
        self._raw = None
        self._store.arrived(self)
        return True

    def _straight_to_disk(self, raw: torch.Tensor) -> bool:
        """It is larger than the host's limit, or everything on the host is still on its way there."""
        far = DiskStored(self._store.disk, self.nbytes, self._dtype, self._device, raw)
        if not far.start():
            return False
        self._far, self._near, self._raw = far, None, None
        return True

    def begin_to_move_on(self) -> bool:
        """Begin to write it to the disk. False: there is no room, or it is there."""
        if self._far is None and self._near is not None:
            far = DiskStored(self._store.disk, self.nbytes, self._dtype, self._device, None)
            if far.write(*self._near.on_host()):
                self._far = far
        return self._far is not None and self._near is not None

    def move_on(self) -> bool:
        """Be on the disk, and on the host no longer. False: there is no room."""
        if not self.begin_to_move_on() or self._far is None:
            return False
        try:
            self._far.wait_until_written()
        except Exception:
            self._far = None  # the host still has it
            raise
        with self._lock:
            near, self._near = self._near, None
        if near is not None:
            near.vacate()
        return True

    def release(self) -> None:
        self._place.release()

    def prefetch(self) -> None:
        with self._lock:
            self._place.prefetch()

    def get(self) -> torch.Tensor:
        with self._lock:
            if self._near is not None:
                return self._counted(self._near, self._near.get())
        return self._counted(self._place, self._place.get())

    def _counted(self, place: Stored, raw: torch.Tensor) -> torch.Tensor:
        self._fetched += place.take_fetched()
        return raw

    def take_fetched(self) -> int:
        fetched, self._fetched = self._fetched, 0
        return fetched


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
