"""Raw spans: a tensor is moved as a run of bytes of its storage, and comes back as the same view of them.

So an expanded tensor costs what it holds, a transposed one keeps its layout (and with it the kernels' bits), and every
copy is contiguous, which is what makes it asynchronous. Views that leave gaps, such as the queries, keys and values of
one projection, are moved as their whole storage: once for all of them.

What happens to the tensors that a region saves: pack and unpack, and the order of copies.

`pack` returns an object that the graph owns; nothing else holds it. Each call of a region knows the call before it,
weakly. From that follows the whole schedule:

- When a call has packed its tensors, those of the call before it start to move away, and they are off the device when
  this call's forward has been submitted. So the copy has one region's compute to hide behind, and the last region's
  tensors, which backward needs first, never leave.
- When backward asks for a call's tensors, those of the call before it start to come back.

[Note: in-place changes] A hook takes autograd's own check away: a tensor that was changed in place after it was saved
would give a wrong gradient without an error. So a packed tensor keeps the version it had and a probe that shares its
version counter, and unpacking compares them. The probe holds no memory.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from lowtide._torch import StorageWeakRef, aliases_parameter, keep_version, storage_key, version_of
from lowtide.errors import InPlaceError, InvalidValueError
from lowtide.stores import HostStore, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.counters import RegionLedger
    from lowtide.stores import Stored

SPARSE = 4
"""A view that holds less than a quarter of the bytes that would have to be moved for it stays where it is."""


class Span(NamedTuple):
    """A run of elements of a tensor's storage, and where the tensor lies in it."""

    start: int
    length: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run as a flat tensor over the same memory."""
        return tensor.detach().as_strided((self.length,), (1,), self.start)

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of its run."""
        return raw.as_strided(self.shape, self.stride, raw.storage_offset() + self.offset)


def span_of(tensor: torch.Tensor) -> Span | None:
    """What has to be moved for a tensor, or nothing if that is far more than the tensor itself."""
    shape, stride = tensor.shape, tensor.stride()
    length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    start, offset = int(tensor.storage_offset()), 0
    if length > tensor.numel():  # gaps: other views are likely to fill them
        start, offset = 0, start
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
    if length > SPARSE * tensor.numel():
        return None
    return Span(start, length, shape, stride, offset)


MIN_BYTES = 4096
"""Smaller tensors stay: a copy would cost more than it frees."""


class Schedule:
    """Forward order within one store: the newest call, and what is already stored."""

    __module__ = "lowtide"

    def __init__(self, store: Store, *, alone: bool = False) -> None:
        self.store = store
        self.alone = alone  # one call that no other follows: its tensors leave during its own forward
        self._newest: weakref.ref[RegionCall] | None = None
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Entry] = weakref.WeakValueDictionary()

    def begin(
        self, ledger: RegionLedger, skip: Callable[[torch.Tensor], bool] | None = None, ahead: int | None = None
    ) -> RegionCall:
        """A new call, after the newest one: of a region, or of one tensor with `ahead` others to fetch early."""
        call = RegionCall(self, ledger, self._newest, skip, ahead)
        self._newest = weakref.ref(call)
        return call

    def forget(self, call: RegionCall) -> None:
        """Its forward failed: the next call follows the one before it."""
        if self._newest is not None and self._newest() is call:
            self._newest = call.preceding

    def entry(self, tensor: torch.Tensor, span: Span) -> tuple[_Entry, bool]:
        """The stored form of a tensor's bytes, and whether it is new. The same bytes are stored once."""
        key = _identity(tensor, span)
        entry = self._known.get(key)
        # Once the bytes are away, equal versions prove nothing: `.data` and custom kernels write without counting.
        if entry is not None and not entry.is_orphan and not entry.stored.is_away:
            return entry, False
        entry = _Entry(self.store.put(span.take(tensor)), _weak(tensor))
        self._known[key] = entry
        return entry, True


@dataclasses.dataclass(eq=False)
class _Entry:
    """A stored tensor, and the storage that it was taken from: an address alone may be somebody else's by now."""

    stored: Stored
    source: StorageWeakRef
    stays: bool = False
    awaited: int = 0
    """Packed tensors of these bytes that backward has not asked for yet."""
    _held: torch.Tensor | None = None

    def ask(self, packed: Packed) -> torch.Tensor:
        """The bytes, on the device. As in plain autograd they stay there until all who saved them have had them."""
        raw = self.stored.get()
        if not packed.was_asked_for:
            packed.was_asked_for = True
            self.awaited -= 1
        self._held = raw if self.awaited else None
        return raw

    @property
    def is_orphan(self) -> bool:
        return bool(self.source.expired())  # type: ignore[no-untyped-call]


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _identity(tensor: torch.Tensor, span: Span) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (tensor.device, storage_key(storage), tensor.dtype, span.start, span.length, version_of(tensor))


@dataclasses.dataclass(eq=False, slots=True)
class Packed:
    """What the graph holds for one saved tensor."""

    call: RegionCall
    stored: tuple[_Entry, Span] | None
    kept: torch.Tensor | None
    probe: torch.Tensor
    version: int
    was_asked_for: bool = False


class RegionCall:
    """One call of a region: the tensors it saved, and the call before it."""

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
        """A tensor that it saved and that is in host memory already."""
        self._entries: list[weakref.ref[_Entry]] = []

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Autograd's pack hook. Nothing moves before the whole call has packed."""
        version = version_of(tensor)
        span = span_of(tensor) if self._is_worth_moving(tensor) else None
        if span is None:
            self.ledger.saved_bytes += tensor.nbytes if tensor.layout is torch.strided else 0
            kept = tensor.detach()
            return Packed(self, None, kept, kept, version)
        self.moves_something = True
        entry, is_new = self._schedule.entry(tensor, span)
        entry.awaited += 1
        self.ledger.movable_bytes += entry.stored.nbytes
        if is_new:
            self.ledger.saved_bytes += entry.stored.nbytes
            self._entries.append(weakref.ref(entry))
        elif self._is_region and entry not in self._alive() and not entry.stored.is_away:
            entry.stays = True  # regions share it, and it is still here: bringing it back for each would cost more
        return Packed(self, (entry, span), None, _version_probe(tensor), version)

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Autograd's unpack hook."""
        if version_of(packed.probe) != packed.version:
            raise InPlaceError(
                f"region {self.ledger.name!r}: a tensor that backward needs was modified by an inplace operation after "
                f"it was saved (version {packed.version}, now {version_of(packed.probe)}): change a copy of it instead"
            )
        if packed.kept is not None:
            return packed.kept
        entry, span = packed.stored  # type: ignore[misc]  # kept or stored, by construction
        tensor = span.view(entry.ask(packed))
        earlier = self.previous()
        for _ in range(self._ahead):
            if earlier is None:
                break
            earlier.prefetch()
            earlier = earlier.previous()
        self.ledger.restored_bytes += entry.stored.take_fetched()
        return tensor

    def on_packed(self) -> None:
        """All inputs are packed: the call before this one may let go of its own."""
        if self._is_region and self.on_host is not None and not self.moves_something:
            self._schedule.store.require_useful(self.on_host)
        if self._schedule.alone:
            self.start()
        if (previous := self.previous()) is not None:
            previous.start()

    def on_submitted(self) -> None:
        """This call's forward is submitted: the memory of the call before it goes back."""
        if self._schedule.alone:
            self.release()
        if (previous := self.previous()) is not None:
            previous.release()

    def previous(self) -> RegionCall | None:
        """The call before this one, if its graph lives."""
        return None if self.preceding is None else self.preceding()

    def start(self) -> None:
        """Begin to move this call's tensors away."""
        for entry in self._alive():
            if entry.stays or entry.stored.is_away:
                continue
            if not entry.stored.start():
                entry.stays = True
                self.ledger.declined_bytes += entry.stored.nbytes

    def release(self) -> None:
        """Give their device memory back."""
        for entry in self._alive():
            if not entry.stays and not entry.stored.is_away:
                entry.stored.release()
                self.ledger.packed_bytes += entry.stored.nbytes

    def prefetch(self) -> None:
        """Begin to bring them back."""
        for entry in self._alive():
            entry.stored.prefetch()

    def _alive(self) -> list[_Entry]:
        return [entry for entry in (ref() for ref in self._entries) if entry is not None]

    def _is_worth_moving(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return False  # a run of bytes does not tell how they are to be read
        if tensor.nbytes < MIN_BYTES or isinstance(tensor, torch.nn.Parameter):
            return False
        if aliases_parameter(tensor) or type(tensor) is not torch.Tensor:
            return False
        if tensor.device.type == "cpu" and not self._schedule.store.takes_host_tensors:
            self.on_host = tensor  # a side table is fine; a region with nothing else cannot be offloaded
            return False
        return self._skip is None or not self._skip(tensor)


IN_FLIGHT = 4
"""Tensors whose copy may be under way at once: more overlap, against the memory that they hold meanwhile."""


def _version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares `tensor`'s version counter."""
    probe = tensor.detach()
    with torch.no_grad(), keep_version(probe):
        probe.set_()  # type: ignore[call-overload]
    return probe


def as_schedule(offload: Literal["host"] | Store | Schedule | None) -> Schedule | None:
    """What `offload=` means: a word, a store, or a schedule that several regions share."""
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
    """The one that calls with this store share. They hold it, and it the store, which therefore knows it weakly."""
    reference = store.__dict__.get("_schedule")
    schedule: Schedule | None = None if reference is None else reference()
    if schedule is None:
        schedule = Schedule(store)
        store.__dict__["_schedule"] = weakref.ref(schedule)
    return schedule
