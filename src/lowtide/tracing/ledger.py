"""Records every storage of a real step, from the operation that makes it to its last reference.

The simulation's ledger does the same with meta tensors, and both write the same events. What forward makes is `working`
until the step moves on; what is alive then is `saved`: the graph holds it, through hooks, closures, keywords or caches
alike, or the program does. Copies between the device and the host are recorded when they are submitted.

Nothing is kept alive: a finalizer on each storage records its end, and `close` removes the finalizers.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowtide._torch import TorchDispatchMode, is_functorch_wrapped, is_traceable_wrapper_subclass, storage_key
from lowtide.recording import Event, Moment, Owner, tensors_in, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lowtide.tracing.phases import PhaseTracker

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Move(NamedTuple):
    """A copy of bytes from one place to another."""

    seconds: float
    direction: str
    """`to host`, `to device`, `to disk` or `from disk`."""
    nbytes: int
    phase: str
    region: str
    """The region that made the bytes, if they went to the host; otherwise the region that ran."""


class _Known(NamedTuple):
    number: int
    nbytes: int
    place: str
    owner: Owner
    end: weakref.finalize[Any, Any]


class StorageLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records storages and copies. `clock` returns the seconds since the trace began."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.moves: list[Move] = []
        self.tracker: PhaseTracker | None = None
        self._device = device.type
        self._clock = clock
        self._moment = Moment("between", "")
        self._numbers = itertools.count()
        self._known: dict[int, _Known] = {}
        self._in_work: dict[int, int] = {}
        """The storages that forward made since the step last moved on, with their numbers."""

    def claim(self, tensor: Tensor, kind: str, region: str = "") -> None:
        """Say whose a tensor is. One that is not known was there before, and is counted from now on."""
        for storage in _storages(tensor):
            known = self._known.get(storage_key(storage))
            if known is None:
                self._add(storage, Owner(kind, region))
            elif known.owner.kind != kind:
                self._change_owner(storage_key(storage), Owner(kind, region))

    def move_on(self, moment: Moment) -> None:
        """Enter the next moment of the step: what forward made and is still alive is `saved` from now on."""
        self._update_sizes()
        for key, number in self._in_work.items():
            known = self._known.get(key)
            if known is not None and known.number == number and known.owner.kind == "working":
                self._change_owner(key, Owner("saved", known.owner.region))
        self._in_work.clear()
        self._moment = moment

    def saved(self) -> dict[str, int]:
        """Return the bytes on the device that are saved now, by the region that made them."""
        found: dict[str, int] = {}
        for known in list(self._known.values()):
            if known.owner.kind == "saved" and known.place == "device":
                found[known.owner.region] = found.get(known.owner.region, 0) + known.nbytes
        return {region: nbytes for region, nbytes in found.items() if nbytes}

    def close(self) -> None:
        """Stop watching storages: they may live on, but their end is no longer recorded."""
        known, self._known = self._known, {}
        for storage in list(known.values()):
            storage.end.detach()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.tracker is not None:
            self.tracker.update()
        for tensor in tensors_of(args, kwargs):
            self._note_input(tensor)
        out = func(*args, **kwargs)
        results = tensors_in((out,))
        for tensor in results:
            self._note_result(tensor)
        if func in _COPIES:
            self._note_copy(results[0], args[1] if func is _COPIES[0] else args[0])
        if self.tracker is not None:
            self.tracker.extend()
        return out

    def _note_input(self, tensor: Tensor) -> None:
        """Count an argument that was there before the trace began: the batch, or the optimizer's states."""
        kind = {"backward": "other", "recompute": "other", "optimizer": "optimizer"}.get(self._moment.phase, "batch")
        for storage in _storages(tensor):
            if storage_key(storage) not in self._known:
                self._add(storage, Owner(kind, ""))
            else:
                self._resize(storage)
        if isinstance(tensor, torch.nn.Parameter):
            self.claim(tensor, "weights")  # FSDP gathered it

    def _note_result(self, tensor: Tensor) -> None:
        """Count a result whose storage is new."""
        for storage in _storages(tensor):
            if storage_key(storage) in self._known:
                self._resize(storage)
                continue
            number = self._add(storage, Owner(self._kind_of_result(), self._moment.region))
            if self._moment.phase == "forward":
                self._in_work[storage_key(storage)] = number

    def _kind_of_result(self) -> str:
        phase = self._moment.phase
        return {"recompute": "recomputed", "optimizer": "optimizer", "between": "other"}.get(phase, "working")

    def _note_copy(self, target: Tensor, source: Any) -> None:
        if not isinstance(source, Tensor) or target.device.type == source.device.type:
            return
        if target.device.type == "cpu":
            (known, *_) = [self._known.get(storage_key(storage)) for storage in _storages(source)] or [None]
            region = self._moment.region if known is None else known.owner.region
            self._record_move("to host", target.nbytes, region)
        elif source.device.type == "cpu":
            self._record_move("to device", target.nbytes, self._moment.region)
            self._claim_arrived(target)

    def _claim_arrived(self, target: Tensor) -> None:
        """Say whose a copy from the host is: in backward it was offloaded; before a region runs it is the batch."""
        if self._moment.phase in ("backward", "recompute"):
            self.claim(target, "restored", self._moment.region)
        elif not self._moment.region:
            self.claim(target, "batch")

    def _record_move(self, direction: str, nbytes: int, region: str) -> None:
        self.moves.append(Move(self._clock(), direction, nbytes, self._moment.phase, region))

    def _add(self, storage: torch.UntypedStorage, owner: Owner) -> int:
        number = next(self._numbers)
        key = storage_key(storage)
        place = "device" if storage.device.type == self._device else "host"
        end = weakref.finalize(storage, self._end, key)
        end.atexit = False
        self._known[key] = _Known(number, storage.nbytes(), place, owner, end)
        self._write(storage.nbytes(), self._known[key])
        return number

    def _update_sizes(self) -> None:
        """Look for storages that changed their size: FSDP frees gathered weights that way, without an operation."""
        for known in list(self._known.values()):
            alive = known.end.peek()
            if alive is not None:
                self._resize(alive[0])

    def _resize(self, storage: torch.UntypedStorage) -> None:
        known = self._known[storage_key(storage)]
        if storage.nbytes() != known.nbytes:
            self._known[storage_key(storage)] = known._replace(nbytes=storage.nbytes())
            self._write(storage.nbytes() - known.nbytes, known)

    def _change_owner(self, key: int, owner: Owner) -> None:
        self._known[key] = self._known[key]._replace(owner=owner)
        self._write(0, self._known[key])

    def _end(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._write(-known.nbytes, known)

    def _write(self, change: int, known: _Known) -> None:
        self.events.append(Event(change, known.number, known.place, known.owner, self._moment, self._clock()))


def _storages(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    """Return the storages behind a tensor: those of a wrapper's parts (DTensor), and none for a meta tensor."""
    if type(tensor) not in _PLAIN_TYPES and is_traceable_wrapper_subclass(tensor):  # type: ignore[unreachable]  # to mypy no tensor is one
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[unreachable]
        return [storage for part in parts if isinstance(part, Tensor) for storage in _storages(part)]
    if tensor.is_meta or tensor.layout is not torch.strided or not _is_plain(tensor):
        return ()
    return (tensor.untyped_storage(),)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is not a wrapper, functorch's or anybody's, whose memory is hidden."""
    if type(tensor) not in _PLAIN_TYPES and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return not is_functorch_wrapped(tensor)
