"""What happens to the tensors that a region saves: pack and unpack, and the order of copies.

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

import collections
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.checkpointing.spans import span_of
from lowtide.errors import InPlaceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.checkpointing.spans import Span
    from lowtide.measure import RegionLedger
    from lowtide.stores import Store, Stored

MIN_BYTES = 4096
"""Smaller tensors stay: a copy would cost more than it frees."""


class Schedule:
    """Forward order within one store: the newest call, and what is already stored."""

    def __init__(self, store: Store, *, alone: bool = False) -> None:
        self.store = store
        self.alone = alone  # one call that no other follows: its tensors leave during its own forward
        self._newest: weakref.ref[Call] | None = None
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Entry] = weakref.WeakValueDictionary()

    def begin(
        self, ledger: RegionLedger, skip: Callable[[torch.Tensor], bool] | None = None, ahead: int | None = None
    ) -> Call:
        """A new call, after the newest one: of a region, or of one tensor with `ahead` others to fetch early."""
        call = Call(self, ledger, self._newest, skip, ahead)
        self._newest = weakref.ref(call)
        return call

    def forget(self, call: Call) -> None:
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
    return (tensor.device, storage._cdata, tensor.dtype, span.start, span.length, tensor._version)


@dataclasses.dataclass(eq=False, slots=True)
class Packed:
    """What the graph holds for one saved tensor."""

    call: Call
    stored: tuple[_Entry, Span] | None
    kept: torch.Tensor | None
    probe: torch.Tensor
    version: int
    was_asked_for: bool = False


class Call:
    """One call of a region: the tensors it saved, and the call before it."""

    def __init__(
        self,
        schedule: Schedule,
        ledger: RegionLedger,
        previous: weakref.ref[Call] | None,
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
        version = tensor._version
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
        if packed.probe._version != packed.version:
            raise InPlaceError(
                f"region {self.ledger.name!r}: a tensor that backward needs was modified by an inplace operation after "
                f"it was saved (version {packed.version}, now {packed.probe._version}): change a copy of it instead"
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

    def packed_all(self) -> None:
        """All inputs are packed: the call before this one may let go of its own."""
        if self._is_region and self.on_host is not None and not self.moves_something:
            self._schedule.store.check(self.on_host)
        if self._schedule.alone:
            self.start()
        if (previous := self.previous()) is not None:
            previous.start()

    def submitted(self) -> None:
        """This call's forward is submitted: the memory of the call before it goes back."""
        if self._schedule.alone:
            self.settle()
        if (previous := self.previous()) is not None:
            previous.settle()

    def previous(self) -> Call | None:
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

    def settle(self) -> None:
        """Give their device memory back."""
        for entry in self._alive():
            if not entry.stays and not entry.stored.is_away:
                entry.stored.settle()
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
        if isinstance(tensor._base, torch.nn.Parameter) or type(tensor) is not torch.Tensor:
            return False
        if tensor.device.type == "cpu" and not self._schedule.store.takes_host_tensors:
            self.on_host = tensor  # a side table is fine; a region with nothing else cannot be offloaded
            return False
        return self._skip is None or not self._skip(tensor)


IN_FLIGHT = 4
"""Tensors whose copy may be under way at once: more overlap, against the memory that they hold meanwhile."""


class OneByOne:
    """Offloads tensors one by one, where there are no regions to go by; a bounded number of copies is in flight."""

    def __init__(self, schedule: Schedule, skip: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._schedule = schedule
        self._skip = skip
        self._in_flight: collections.deque[Call] = collections.deque()
        self._on_host: torch.Tensor | None = None
        self._moves_something = False

    def pack(self, tensor: torch.Tensor, ledger: RegionLedger) -> Packed:
        """Take a tensor; the one before it starts to move."""
        call = self._schedule.begin(ledger, self._skip, ahead=IN_FLIGHT)
        packed = call.pack(tensor)
        call.packed_all()
        self._on_host = self._on_host if call.on_host is None else call.on_host
        self._moves_something |= call.moves_something
        self._in_flight.append(call)
        if len(self._in_flight) > IN_FLIGHT:
            self._in_flight.popleft().submitted()
        return packed

    def check(self) -> None:
        """Ask the store what it says if all that came since the last time is in host memory already."""
        on_host, self._on_host = self._on_host, None
        moved, self._moves_something = self._moves_something, False
        if on_host is not None and not moved:
            self._schedule.store.check(on_host)

    def flush(self) -> None:
        """Nothing more comes: give back all memory whose copy was started."""
        while self._in_flight:
            self._in_flight.popleft().submitted()


def _version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares `tensor`'s version counter."""
    probe = tensor.detach()
    with torch.no_grad(), _unsafe_preserve_version_counter(probe):
        probe.set_()  # type: ignore[call-overload]
    return probe
