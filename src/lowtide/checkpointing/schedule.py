"""Decides what happens to the tensors that a region saves: how they are packed and unpacked, and in which order copied.

`pack` returns an object that the graph owns; nothing else holds it. Each call of a region knows the call before it,
weakly. The whole schedule follows from that:

- When a call has packed its tensors, those of the call before it start to move away, and they are off the device when
  this call's forward has been submitted. So a copy has one region's compute to hide behind, and the last region's
  tensors, which backward needs first, never leave.
- When backward asks for a call's tensors, those of the call before it start to come back.

A tensor is moved as a run of bytes of its storage (a raw `Span`), and comes back as the same view of them. So an
expanded tensor costs what it holds, a transposed one keeps its layout (and with it the kernels' bits), and every copy
is contiguous, which is what makes it asynchronous. Views that leave gaps, such as the queries, keys and values of one
projection, are moved as their whole storage: once for all of them.

[Note: in-place changes] A saved-tensor hook bypasses autograd's own check: a tensor that was changed in place after it
was saved would give a wrong gradient without an error. So a packed tensor keeps the version it had and a probe that
shares its version counter, and unpacking compares them. The probe holds no memory.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from lowtide._torch import (
    StorageWeakRef,
    alias_of,
    aliases_parameter,
    is_zero_tensor,
    keep_version,
    outside_graph,
    storage_key,
    version_of,
)
from lowtide.errors import InPlaceError, InvalidValueError
from lowtide.stores import HostStore, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.counters import RegionLedger
    from lowtide.stores import Stored

MIN_BYTES = 4096
"""Smaller tensors stay on the device: a copy would cost more than it frees."""

SPARSE = 4
"""A view stays on the device if it holds less than a quarter of the bytes that would have to be moved for it."""


def as_schedule(offload: Literal["host"] | Store | Schedule | None) -> Schedule | None:
    """Return the schedule that `offload=` means: a word, a store, or a schedule that several regions share."""
    if offload is None or isinstance(offload, Schedule):
        return offload
    if isinstance(offload, Store):
        return _schedule_of(offload)
    if offload == "host":
        return Schedule(HostStore(), alone=True)
    raise InvalidValueError(
        f'offload must be "host", a store such as lowtide.DiskStore("/a/directory"), or None, got {offload!r}'
    )


def _schedule_of(store: Store) -> Schedule:
    """Return the schedule that all calls with this store share. It holds the store, which therefore holds it weakly."""
    reference = store.__dict__.get("_schedule")
    schedule: Schedule | None = None if reference is None else reference()
    if schedule is None:
        schedule = Schedule(store)
        store.__dict__["_schedule"] = weakref.ref(schedule)
    return schedule


class Schedule:
    """The order of calls that share a store: the newest call, and which bytes are stored already."""

    __module__ = "lowtide"

    def __init__(self, store: Store, *, alone: bool = False) -> None:
        self.store = store
        self.alone = alone  # a single call that no other follows: its tensors leave during its own forward
        self._newest: weakref.ref[RegionCall] | None = None
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Entry] = weakref.WeakValueDictionary()

    def begin(
        self, ledger: RegionLedger, skip: Callable[[torch.Tensor], bool] | None = None, ahead: int | None = None
    ) -> RegionCall:
        """Begin a call after the newest one.

        It is a region's call, or with `ahead` the call of a single tensor that fetches so many others early.
        """
        call = RegionCall(self, ledger, self._newest, skip, ahead)
        self._newest = weakref.ref(call)
        return call

    def forget(self, call: RegionCall) -> None:
        """Take back a call whose forward failed: the next call follows the one before it."""
        if self._newest is not None and self._newest() is call:
            self._newest = call.preceding

    def entry(self, tensor: torch.Tensor, span: Span) -> tuple[_Entry, bool]:
        """Return the stored form of a tensor's bytes, and whether it is new. The same bytes are stored once."""
        key = _identity(tensor, span)
        entry = self._known.get(key)
        # Once the bytes are away, equal versions prove nothing: `.data` and custom kernels write without counting.
        if entry is not None and not entry.is_source_freed and not entry.stored.is_away:
            return entry, False
        entry = _Entry(self.store.put(span.raw(tensor)), _weak(tensor))
        self._known[key] = entry
        return entry, True


class RegionCall:
    """One call of a region: the tensors that it saved, and a weak reference to the call before it.

    Its life: `pack` for each input, `on_packed` before the forward runs, `on_submitted` when the forward has been
    submitted; later `unpack` for each tensor that backward asks for.
    """

    def __init__(
        self,
        schedule: Schedule,
        ledger: RegionLedger,
        previous: weakref.ref[RegionCall] | None,
        skip: Callable[[torch.Tensor], bool] | None,
        ahead: int | None,
    ) -> None:
        self.ledger = ledger
        self._schedule = schedule
        self.preceding = previous
        self._skip = skip
        self._is_region = ahead is None
        self._ahead = ahead or 1
        self.moves_something = False
        self.on_host: torch.Tensor | None = None
        """A tensor that the call saved and that is in host memory already; without its graph, which holds this call."""
        self._entries: list[weakref.ref[_Entry]] = []

    @outside_graph
    def pack(self, tensor: torch.Tensor) -> Packed:
        """Pack a tensor (autograd's hook). Nothing moves before the whole call has packed."""
        version = version_of(tensor)
        is_wanted = self._is_worth_moving(tensor)
        span = span_of(tensor) if is_wanted else None
        if span is None:
            self.ledger.unmovable_bytes += tensor.nbytes if is_wanted else 0
            self.ledger.saved_bytes += tensor.nbytes if tensor.layout is torch.strided else 0
            kept = alias_of(tensor)
            return Packed(self, None, kept, kept, version)
        self.moves_something = True
        entry, is_new = self._schedule.entry(tensor, span)
        entry.awaited += 1
        self.ledger.movable_bytes += entry.stored.nbytes
        if is_new:
            self.ledger.saved_bytes += entry.stored.nbytes
            self._entries.append(weakref.ref(entry))
        elif self._is_region and entry not in self._living_entries() and not entry.stored.is_away:
            entry.stays = True  # regions share it, and it is still here: bringing it back for each would cost more
        return Packed(self, (entry, span), None, version_probe(tensor), version)

    @outside_graph  # compiled autograd would look into the store
    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return a packed tensor (autograd's hook), and begin to fetch the tensors of the calls before this one."""
        if packed.is_changed:
            raise InPlaceError(
                f"region {self.ledger.name!r}: a tensor needed for backward was modified by an inplace operation after "
                f"it was saved (it was at version {packed.version} and is now at version {version_of(packed.probe)}). "
                "Modify a copy of it instead, for example x = x + 1 instead of x += 1"
            )
        if packed.kept is not None:
            return packed.kept
        entry, span = packed.stored  # type: ignore[misc]  # kept or stored, by construction
        tensor = span.view(entry.get(packed))
        earlier = self.previous()
        for _ in range(self._ahead):
            if earlier is None:
                break
            earlier.prefetch()
            earlier = earlier.previous()
        self.ledger.restored_bytes += entry.stored.take_fetched()
        return tensor

    def on_packed(self) -> None:
        """Start to move the tensors of the call before this one: all of this call's inputs are packed."""
        if self._is_region and self.on_host is not None and not self.moves_something:
            self._schedule.store.require_useful(self.on_host, self.ledger.name)
        if self._schedule.alone:
            self.start()
        if (previous := self.previous()) is not None:
            previous.start()

    def on_submitted(self) -> None:
        """Release the memory of the call before this one: this call's forward has been submitted."""
        if self._schedule.alone:
            self.start()  # what a selective policy kept was packed during the forward, if hooks are respected
            self.release()
        if (previous := self.previous()) is not None:
            previous.release()

    def previous(self) -> RegionCall | None:
        """Return the call before this one, if its graph lives."""
        return None if self.preceding is None else self.preceding()

    def start(self) -> None:
        """Begin to move this call's tensors away."""
        for entry in self._living_entries():
            if entry.stays or entry.stored.is_away:
                continue
            if not entry.stored.start():
                entry.stays = True
                self.ledger.declined_bytes += entry.stored.nbytes

    def release(self) -> None:
        """Give back the device memory of this call's tensors."""
        for entry in self._living_entries():
            if not entry.stays and not entry.stored.is_away:
                entry.stored.release()
                self.ledger.packed_bytes += entry.stored.nbytes

    def prefetch(self) -> None:
        """Begin to bring this call's tensors back."""
        for entry in self._living_entries():
            entry.stored.prefetch()

    def _living_entries(self) -> list[_Entry]:
        return [entry for entry in (reference() for reference in self._entries) if entry is not None]

    def _is_worth_moving(self, tensor: torch.Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        if size < MIN_BYTES or isinstance(tensor, torch.nn.Parameter) or aliases_parameter(tensor):
            return False
        if not _is_run_of_bytes(tensor):
            self.ledger.unmovable_bytes += size
            return False
        if tensor.device.type == "cpu" and not self._schedule.store.takes_host_tensors:
            self.on_host = tensor.detach()  # a small table beside others is fine; a region with nothing else is refused
            return False
        return self._skip is None or not self._skip(tensor)


# --- What the graph holds -------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, slots=True)
class Packed:
    """What the graph holds for one saved tensor: either its stored bytes and their span, or the tensor as it is."""

    call: RegionCall
    stored: tuple[_Entry, Span] | None
    kept: torch.Tensor | None
    probe: torch.Tensor
    version: int
    was_requested: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        return version_of(self.probe) != self.version

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        return self.call.unpack(self)


@dataclasses.dataclass(eq=False)
class _Entry:
    """Stored bytes, shared by all packed tensors that are views of them.

    It remembers the storage that they were taken from: an address alone may be another storage's by now.
    """

    stored: Stored
    source: StorageWeakRef
    stays: bool = False
    awaited: int = 0
    """Packed tensors of these bytes that backward has not asked for yet."""
    _held: torch.Tensor | None = None

    def get(self, packed: Packed) -> torch.Tensor:
        """Return the bytes on the device, and keep them there until every packed tensor was asked for, as autograd."""
        raw = self.stored.get()
        if not packed.was_requested:
            packed.was_requested = True
            self.awaited -= 1
        self._held = raw if self.awaited else None
        return raw

    @property
    def is_source_freed(self) -> bool:
        return bool(self.source.expired())  # type: ignore[no-untyped-call]


def _is_run_of_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor's storage are all there is to it: nothing else says how to read them."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and not (tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor))


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _identity(tensor: torch.Tensor, span: Span) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (tensor.device, storage_key(storage), tensor.dtype, span.start, span.length, version_of(tensor))


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that shares `tensor`'s version counter."""
    probe = alias_of(tensor)
    with torch.no_grad(), keep_version(probe):
        probe.set_()  # type: ignore[call-overload]
    return probe


# --- Raw spans ------------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """A run of elements of a tensor's storage, and how the tensor is viewed in it."""

    start: int
    length: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the run as a flat tensor over the memory of `tensor`."""
        return tensor.detach().as_strided((self.length,), (1,), self.start)

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of its run."""
        return raw.as_strided(self.shape, self.stride, raw.storage_offset() + self.offset)


def span_of(tensor: torch.Tensor) -> Span | None:
    """Return the run that has to be moved for a tensor, or None if that is far more than the tensor itself."""
    shape, stride = tensor.shape, tensor.stride()
    length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    start, offset = int(tensor.storage_offset()), 0
    if length > tensor.numel():  # gaps: other views are likely to fill them
        start, offset = 0, start
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
    if length > SPARSE * tensor.numel():
        return None
    return Span(start, length, shape, stride, offset)
