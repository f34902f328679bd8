"""The host tier: saved tensors wait in pinned memory, and their copies overlap with compute.

Two side streams per device and store carry the copies, one in each direction. All device memory belongs to the compute
stream, which is asked for at each use: a copy stream waits for it before a copy, and it waits for the copy before the
memory is used or given back. The host never waits, and `record_stream` is needed only where a program has more than
one compute stream.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from lowtide.errors import OffloadError
from lowtide.stores.base import Store, Stored, Usage, WeakTensor
from lowtide.stores.host_memory import HostMemory, SlabPool
from lowtide.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.stores.host_memory import Piece

_DEFAULT_STREAM = 0


class HostStore(Store):
    """Pinned host memory up to `limit` (bytes, or a string such as `"8GiB"`; None: no limit)."""

    __module__ = "lowtide"

    name = "host"

    def __init__(self, limit: int | str | None = None) -> None:
        self.limit = None if limit is None else parse_bytes(limit)
        self._memory = HostMemory()
        self._pool = SlabPool(self.limit, allocate=self._memory)
        self._lock = threading.Lock()
        self.copy_streams = CopyStreamCache()
        self.waits = StreamWaits()

    def require_useful(self, tensor: torch.Tensor, region: str) -> None:
        if tensor.device.type == "cpu":
            raise OffloadError(
                f"region {region!r} cannot be offloaded to the host: what it saves is on the CPU, in host memory "
                "already, so nothing would be freed. Use recompute alone (with a rule for this part, if others are on "
                f"an accelerator: '{region}: recompute'), or the disk tier: offload(disk=/a/directory)"
            )

    def put(self, raw: torch.Tensor) -> Stored:
        return HostStored(self, raw)

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return self._pool.used

    @property
    def peak_bytes(self) -> int:
        return self._pool.peak

    @property
    def seconds_waited(self) -> float:
        return self.waits.seconds()

    def usage(self) -> Usage:
        return Usage(
            host_bytes=self.bytes_used,
            peak_host_bytes=self.peak_bytes,
            pageable_bytes=self._memory.pageable_bytes,
            seconds_waited=self.seconds_waited,
        )

    def allocate(self, size: int, device: torch.device) -> list[Piece] | None:
        """Return pinned memory for `size` bytes of a device, or None if the limit does not allow it."""
        with self._lock:
            return self._pool.allocate(size, device)


class _Fetch(NamedTuple):
    """A copy back to the device that is in flight."""

    raw: torch.Tensor
    done: torch.Event
    owner: torch.Stream


class _Restored(NamedTuple):
    """Bytes that are back on the device, known as long as someone uses them."""

    raw: WeakTensor
    done: torch.Event
    streams: set[torch.Stream]
    """The streams that have waited for `done`."""


class HostStored(Stored):
    """One tensor of a host store: on the device, being copied away, on the host, or being fetched."""

    _is_constructed = False  # an interrupt may come while it is constructed

    def __init__(self, store: HostStore, raw: torch.Tensor) -> None:
        self._store = store
        self._raw: torch.Tensor | None = raw
        self._dtype, self._device = raw.dtype, raw.device
        self._owner = torch.accelerator.current_stream(raw.device)
        self._pieces: list[Piece] = []
        self._has_begun = False
        self._copied: torch.Event | None = None
        self._fetch: _Fetch | None = None
        self._restored: _Restored | None = None
        self._fetched = 0
        self._was_fetched = False
        self.nbytes = raw.nbytes
        self._is_constructed = True

    @property
    def is_away(self) -> bool:
        return self._raw is None

    @torch.no_grad()
    def start(self) -> bool:
        if self._copied is not None or self._raw is None:
            return True
        if not self._pieces:  # else an earlier attempt failed after it had allocated them
            pieces = self._store.allocate(self.nbytes, self._device)
            if pieces is None:
                return False
            self._pieces = pieces
        streams = self._store.copy_streams.on(self._device)
        streams.d2h.wait_stream(self._owner)
        self._has_begun = True
        streams.d2h.wait_stream(streams.h2d)  # a copy back may still read what these pieces held before
        with streams.d2h:
            for host, device in self._pairs(self._raw):
                host.copy_(device, non_blocking=True)
        self._copied = streams.d2h.record_event()
        return True

    def release(self) -> None:
        if self._copied is not None and self._raw is not None:
            self._store.waits.wait(self._owner, self._copied)
            record_streams(self._raw, self._owner, self._store.copy_streams.on(self._device).d2h)
            self._raw = None

    def prefetch(self) -> None:
        if self._raw is None and not self._was_fetched:  # what was used once is hardly needed again
            with contextlib.suppress(torch.OutOfMemoryError):  # this was only early: `get` fetches it, or raises
                self._fetch = self._start_fetch()

    def get(self) -> torch.Tensor:
        if self._raw is not None:
            return self._raw
        restored = self._already_restored()
        return self._finish_fetch() if restored is None else restored

    def take_fetched(self) -> int:
        fetched, self._fetched = self._fetched, 0
        return fetched

    def host_tensors(self) -> tuple[list[torch.Tensor], torch.Event | None]:
        """Return the pinned memory, piece by piece, and the event after which it holds the bytes."""
        nothing = torch.empty(self.nbytes, dtype=torch.uint8, device="meta")
        return [host for host, _ in self._pairs(nothing)], self._copied

    def free_host_memory(self) -> None:
        """Free the pinned memory: another tier holds the bytes now."""
        self._pieces.clear()

    def _already_restored(self) -> torch.Tensor | None:
        """Return what another view of the same bytes brought back, if that is still in use."""
        if self._restored is None:
            return None
        raw = self._restored.raw.get()
        if raw is None:
            return None
        current = torch.accelerator.current_stream(self._device)
        if current not in self._restored.streams:
            self._store.waits.wait(current, self._restored.done)
            raw.record_stream(current)
            self._restored.streams.add(current)
        return raw

    @torch.no_grad()
    def _start_fetch(self) -> _Fetch:
        owner = torch.accelerator.current_stream(self._device)
        h2d = self._store.copy_streams.on(self._device).h2d
        raw = torch.empty(self.nbytes // self._dtype.itemsize, dtype=self._dtype, device=self._device)
        self._was_fetched = True
        self._fetched += self.nbytes
        h2d.wait_stream(owner)  # a kernel that still runs may use the memory that was just allocated
        h2d.wait_event(self._copied)  # type: ignore[arg-type]  # it is away, so it was copied
        with h2d:
            for host, device in self._pairs(raw):
                device.copy_(host, non_blocking=True)
        return _Fetch(raw, h2d.record_event(), owner)

    def _finish_fetch(self) -> torch.Tensor:
        raw, done, owner = self._fetch or self._start_fetch()
        self._fetch = None
        current = torch.accelerator.current_stream(self._device)
        self._store.waits.wait(current, done)
        if current != owner:  # it was allocated while another stream was current
            owner.wait_event(done)
            raw.record_stream(current)
        self._restored = _Restored(WeakTensor(raw), done, {current, owner})
        return raw

    def _pairs(self, raw: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each piece of pinned memory with its part of the device's bytes."""
        everything = raw.view(torch.uint8)
        position = 0
        for piece in self._pieces:
            count = min(piece.end - piece.start, self.nbytes - position)
            yield piece.bytes(count), everything[position : position + count]
            position += count

    def __del__(self) -> None:
        """Free everything in stream order when the graph dies: device memory under a copy, then the pinned pieces."""
        if not self._is_constructed:
            return
        try:
            if self._has_begun and self._copied is None:  # interrupted in between
                self._owner.wait_stream(self._store.copy_streams.on(self._device).d2h)
            self.release()
            if self._fetch is not None:
                self._fetch.owner.wait_event(self._fetch.done)
        finally:
            self._pieces.clear()


# --- Streams ------------------------------------------------------------------------------------------------------


class CopyStreams(NamedTuple):
    """The side streams of one device: host to device, and device to host."""

    h2d: torch.Stream
    d2h: torch.Stream


class CopyStreamCache:
    """Makes the copy streams of a device at first use, and keeps them as long as its store lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, CopyStreams] = {}

    def on(self, device: torch.device) -> CopyStreams:
        """Return the copy streams of a device."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = CopyStreams(d2h=torch.Stream(device=device), h2d=torch.Stream(device=device))
            return self._streams[device]


def record_streams(raw: torch.Tensor, owner: torch.Stream, *others: torch.Stream) -> None:
    """Record the streams that used `raw` before it is freed, unless its owner is a default stream.

    On a default stream the memory belongs to the owner, which has waited; elsewhere another stream may have allocated
    it.
    """
    if owner.stream_id != _DEFAULT_STREAM:
        for stream in (owner, *others):
            raw.record_stream(stream)


class StreamWaits:
    """Makes streams wait for events, and adds up how long they stood still, from timed events around each wait."""

    KEPT = 256
    """Pairs of events that are kept before those that have passed are added up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: collections.deque[tuple[torch.Event, torch.Event]] = collections.deque()
        self._seconds = 0.0

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make `stream` wait for `event`."""
        before, after = (torch.Event(device=stream.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._pairs.append((before, after))
        if len(self._pairs) > self.KEPT and self._lock.acquire(blocking=False):  # a destructor must not wait
            try:
                while len(self._pairs) > self.KEPT and self._pairs[0][1].query():
                    self._add(*self._pairs.popleft())
            finally:
                self._lock.release()

    def seconds(self) -> float:
        """Return the seconds so far. Waits until every wait that was asked for has ended."""
        with self._lock:
            for _ in range(len(self._pairs)):
                before, after = self._pairs.popleft()
                after.synchronize()
                self._add(before, after)
            return self._seconds

    def _add(self, before: torch.Event, after: torch.Event) -> None:
        self._seconds += before.elapsed_time(after) / 1e3
