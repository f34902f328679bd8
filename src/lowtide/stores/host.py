"""The side streams that carry copies: one pair per device and store, made at first use.

The host tier: saved tensors wait in pinned memory, and the copies overlap with compute.

Two side streams per device carry the copies, one each way. All device memory belongs to the compute stream, asked for
at each use: a side stream waits for it before a copy, and it waits for the copy before memory is used or given back.
The host never waits, and `record_stream` is needed only where a program has more than one compute stream.
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


class CopyStreams(NamedTuple):
    """The side streams of one device."""

    d2h: torch.Stream
    h2d: torch.Stream


class CopyStreamsByDevice:
    """The copy streams of each device that has come by."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[torch.device, CopyStreams] = {}

    def of(self, device: torch.device) -> CopyStreams:
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = CopyStreams(torch.Stream(device=device), torch.Stream(device=device))
            return self._lanes[device]


_DEFAULT_STREAM = 0


def record_streams(raw: torch.Tensor, owner: torch.Stream, *others: torch.Stream) -> None:
    """Before `raw` is let go: unless its owner is a default stream, the memory may belong to another stream."""
    if owner.stream_id != _DEFAULT_STREAM:
        for stream in (owner, *others):
            raw.record_stream(stream)


class Waits:
    """How long compute streams stood still for copies, from pairs of timed events around each wait."""

    KEPT = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: collections.deque[tuple[torch.Event, torch.Event]] = collections.deque()
        self._seconds = 0.0

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """`stream` waits for `event`."""
        before, after = (torch.Event(device=stream.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._pairs.append((before, after))
        if len(self._pairs) > self.KEPT and self._lock.acquire(blocking=False):  # destructors come here: never wait
            try:
                while len(self._pairs) > self.KEPT and self._pairs[0][1].query():
                    self._add(*self._pairs.popleft())
            finally:
                self._lock.release()

    def seconds(self) -> float:
        with self._lock:
            for _ in range(len(self._pairs)):
                before, after = self._pairs.popleft()
                after.synchronize()
                self._add(before, after)
            return self._seconds

    def _add(self, before: torch.Event, after: torch.Event) -> None:
        self._seconds += before.elapsed_time(after) / 1e3


class HostStore(Store):
    """Pinned host memory up to `limit` (bytes, or a string such as `"8GiB"`; None: no limit)."""

    __module__ = "lowtide"

    name = "host"

    def __init__(self, limit: int | str | None = None) -> None:
        self.limit = None if limit is None else parse_bytes(limit)
        self._memory = HostMemory()
        self._pool = SlabPool(self.limit, allocate=self._memory)
        self._lock = threading.Lock()
        self.copy_streams = CopyStreamsByDevice()
        self.waits = Waits()

    def require_useful(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            raise OffloadError(
                "offload to the host was asked for a model on the CPU: its activations are in host memory already, so "
                "nothing would be freed. Use recompute alone, or the disk tier: offload(disk=/a/directory)"
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

    def take(self, size: int, device: torch.device) -> list[Piece] | None:
        with self._lock:
            return self._pool.take(size, device)


class _Arriving(NamedTuple):
    """A copy back to the device."""

    raw: torch.Tensor
    done: torch.Event
    owner: torch.Stream


class _Arrived(NamedTuple):
    """Bytes that are back, as long as somebody else uses them."""

    raw: WeakTensor
    done: torch.Event
    streams: set[torch.Stream]
    """Those that have waited."""


class HostStored(Stored):
    """Held on the device, in flight, away, or on its way back."""

    _is_made = False  # an interrupt may come while it is made

    def __init__(self, store: HostStore, raw: torch.Tensor) -> None:
        self._store = store
        self._raw: torch.Tensor | None = raw
        self._dtype, self._device = raw.dtype, raw.device
        self._owner = torch.accelerator.current_stream(raw.device)
        self._pieces: list[Piece] = []
        self._has_begun = False
        self._copied: torch.Event | None = None
        self._arriving: _Arriving | None = None
        self._restored: _Arrived | None = None
        self._fetched = 0
        self._was_fetched = False
        self.nbytes = raw.nbytes
        self._is_made = True

    @property
    def is_away(self) -> bool:
        return self._raw is None

    @torch.no_grad()
    def start(self) -> bool:
        if self._copied is not None or self._raw is None:
            return True
        if not self._pieces:  # else an earlier attempt failed after it had them
            pieces = self._store.take(self.nbytes, self._device)
            if pieces is None:
                return False
            self._pieces = pieces
        lane, back = self._store.copy_streams.of(self._device)
        lane.wait_stream(self._owner)
        self._has_begun = True
        lane.wait_stream(back)  # the pieces may be those that a copy back still reads
        with lane:
            for host, device in self._parts(self._raw):
                host.copy_(device, non_blocking=True)
        self._copied = lane.record_event()
        return True

    def release(self) -> None:
        if self._copied is not None and self._raw is not None:
            self._store.waits.wait(self._owner, self._copied)
            record_streams(self._raw, self._owner, self._store.copy_streams.of(self._device).d2h)
            self._raw = None

    def prefetch(self) -> None:
        if self._raw is None and not self._was_fetched:  # what was used once is hardly needed again
            with contextlib.suppress(torch.OutOfMemoryError):  # it was only early: `get` fetches it, or raises
                self._arriving = self._fetch()

    def get(self) -> torch.Tensor:
        if self._raw is not None:
            return self._raw
        restored = self._still_restored()
        return self._arrived() if restored is None else restored

    def _still_restored(self) -> torch.Tensor | None:
        """What another view of the same bytes brought back, if that is still in use."""
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

    def take_fetched(self) -> int:
        fetched, self._fetched = self._fetched, 0
        return fetched

    def _arrived(self) -> torch.Tensor:
        raw, done, owner = self._arriving or self._fetch()
        self._arriving = None
        current = torch.accelerator.current_stream(self._device)
        self._store.waits.wait(current, done)
        if current != owner:  # allocated while another stream was current
            owner.wait_event(done)
            raw.record_stream(current)
        self._restored = _Arrived(WeakTensor(raw), done, {current, owner})
        return raw

    @torch.no_grad()
    def _fetch(self) -> _Arriving:
        owner = torch.accelerator.current_stream(self._device)
        lane = self._store.copy_streams.of(self._device).h2d
        raw = torch.empty(self.nbytes // self._dtype.itemsize, dtype=self._dtype, device=self._device)
        self._was_fetched = True
        self._fetched += self.nbytes
        lane.wait_stream(owner)  # the memory may be that of a kernel which still runs
        lane.wait_event(self._copied)  # type: ignore[arg-type]  # it is away, so it was copied
        with lane:
            for host, device in self._parts(raw):
                device.copy_(host, non_blocking=True)
        return _Arriving(raw, lane.record_event(), owner)

    def on_host(self) -> tuple[list[torch.Tensor], torch.Event | None]:
        """The pinned memory, piece by piece, and the event after which it holds the bytes."""
        nothing = torch.empty(self.nbytes, dtype=torch.uint8, device="meta")
        return [host for host, _ in self._parts(nothing)], self._copied

    def vacate(self) -> None:
        """Another tier holds the bytes now."""
        self._pieces.clear()

    def _parts(self, raw: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The pieces of pinned memory, each with its part of the device's bytes."""
        everything = raw.view(torch.uint8)
        position = 0
        for piece in self._pieces:
            count = min(piece.end - piece.start, self.nbytes - position)
            yield piece.bytes(count), everything[position : position + count]
            position += count

    def __del__(self) -> None:
        """The graph died. Device memory under a copy is given back in order; so are the pieces."""
        if not self._is_made:
            return
        try:
            if self._has_begun and self._copied is None:  # interrupted in between
                self._owner.wait_stream(self._store.copy_streams.of(self._device).d2h)
            self.release()
            if self._arriving is not None:
                self._arriving.owner.wait_event(self._arriving.done)
        finally:
            self._pieces.clear()
