"""The ledger of a real step: every storage, from the operation that makes it to its last reference.

The planner's ledger does the same with tensors that have no memory, and both write the same events. What forward makes
is in work until the step moves on; what is alive then is saved: the graph holds it, through hooks, closures, keywords
or caches alike, or the program does. Copies between the device and the host are written down as they are submitted.

Nothing is held alive: a finalizer on each storage writes down its end. `close` takes them back.
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

_USUAL = (Tensor, torch.nn.Parameter)
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Move(NamedTuple):
    """Bytes that went from one place to another."""

    seconds: float
    direction: str
    """`to host`, `to device`, `to disk` or `from disk`."""
    nbytes: int
    phase: str
    region: str
    """To the host: the region that made them. Else the one that ran."""


class _Known(NamedTuple):
    number: int
    nbytes: int
    place: str
    owner: Owner
    end: weakref.finalize[Any, Any]


class StorageLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records storages and copies. `clock` gives seconds since the trace began."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.moves: list[Move] = []
        self.where: PhaseTracker | None = None
        self._device = device.type
        self._clock = clock
        self._moment = Moment("between", "")
        self._numbers = itertools.count()
        self._known: dict[int, _Known] = {}
        self._in_work: dict[int, int] = {}
        """What forward made since the step last moved on: storages, by the number they were given."""

    def claim(self, tensor: Tensor, kind: str, block: str = "") -> None:
        """Say whose a tensor is. If it was not known, it was there before, and is counted from now on."""
        for storage in _storages(tensor):
            known = self._known.get(storage_key(storage))
            if known is None:
                self._add(storage, Owner(kind, block))
            elif known.owner.kind != kind:
                self._hand_over(storage_key(storage), Owner(kind, block))

    def move_on(self, moment: Moment) -> None:
        """The step goes elsewhere: what forward made, and what is still alive, is saved."""
        self._look_at_sizes()
        for cdata, number in self._in_work.items():
            known = self._known.get(cdata)
            if known is not None and known.number == number and known.owner.kind == "working":
                self._hand_over(cdata, Owner("saved", known.owner.region))
        self._in_work.clear()
        self._moment = moment

    def saved(self) -> dict[str, int]:
        """Bytes on the device that are saved now, by the region that made them."""
        found: dict[str, int] = {}
        for known in list(self._known.values()):
            if known.owner.kind == "saved" and known.place == "device":
                found[known.owner.region] = found.get(known.owner.region, 0) + known.nbytes
        return {block: nbytes for block, nbytes in found.items() if nbytes}

    def close(self) -> None:
        """Let go of all storages. They may live on; their end is not written down any more."""
        known, self._known = self._known, {}
        for one in list(known.values()):
            one.end.detach()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.where is not None:
            self.where.look()
        for tensor in tensors_of(args, kwargs):
            self._meet(tensor)
        out = func(*args, **kwargs)
        results = tensors_in((out,))
        for tensor in results:
            self._note(tensor)
        if func in _COPIES:
            self._note_copy(results[0], args[1] if func is _COPIES[0] else args[0])
        if self.where is not None:
            self.where.saw()
        return out

    def _meet(self, tensor: Tensor) -> None:
        """An argument. What was not seen as it was made was there before: the batch, the optimizer's states."""
        kind = {"backward": "other", "recompute": "other", "optimizer": "optimizer"}.get(self._moment.phase, "batch")
        for storage in _storages(tensor):
            if storage_key(storage) not in self._known:
                self._add(storage, Owner(kind, ""))
            else:
                self._resize(storage)
        if isinstance(tensor, torch.nn.Parameter):
            self.claim(tensor, "weights")  # FSDP's, gathered

    def _note(self, tensor: Tensor) -> None:
        """A result: its storage is new, or one that is known."""
        for storage in _storages(tensor):
            if storage_key(storage) in self._known:
                self._resize(storage)
                continue
            number = self._add(storage, Owner(self._kind(), self._moment.region))
            if self._moment.phase == "forward":
                self._in_work[storage_key(storage)] = number

    def _kind(self) -> str:
        phase = self._moment.phase
        return {"recompute": "recomputed", "optimizer": "optimizer", "between": "other"}.get(phase, "working")

    def _note_copy(self, target: Tensor, source: Any) -> None:
        if not isinstance(source, Tensor) or target.device.type == source.device.type:
            return
        if target.device.type == "cpu":
            (known, *_) = [self._known.get(storage_key(storage)) for storage in _storages(source)] or [None]
            region = self._moment.region if known is None else known.owner.region
            self._write_move("to host", target.nbytes, region)
        elif source.device.type == "cpu":
            self._write_move("to device", target.nbytes, self._moment.region)
            self._claim_arrived(target)

    def _claim_arrived(self, target: Tensor) -> None:
        """In backward it is what was offloaded. Before a region runs it is the batch."""
        if self._moment.phase in ("backward", "recompute"):
            self.claim(target, "restored", self._moment.region)
        elif not self._moment.region:
            self.claim(target, "batch")

    def _write_move(self, direction: str, nbytes: int, region: str) -> None:
        self.moves.append(Move(self._clock(), direction, nbytes, self._moment.phase, region))

    def _add(self, storage: torch.UntypedStorage, owner: Owner) -> int:
        number = next(self._numbers)
        cdata = storage_key(storage)
        place = "device" if storage.device.type == self._device else "host"
        end = weakref.finalize(storage, self._end, cdata)
        end.atexit = False
        self._known[cdata] = _Known(number, storage.nbytes(), place, owner, end)
        self._write(storage.nbytes(), self._known[cdata])
        return number

    def _look_at_sizes(self) -> None:
        """FSDP frees gathered weights by making their storage empty, which is no operation."""
        for known in list(self._known.values()):
            alive = known.end.peek()
            if alive is not None:
                self._resize(alive[0])

    def _resize(self, storage: torch.UntypedStorage) -> None:
        known = self._known[storage_key(storage)]
        if storage.nbytes() != known.nbytes:
            self._known[storage_key(storage)] = known._replace(nbytes=storage.nbytes())
            self._write(storage.nbytes() - known.nbytes, known)

    def _hand_over(self, cdata: int, owner: Owner) -> None:
        self._known[cdata] = self._known[cdata]._replace(owner=owner)
        self._write(0, self._known[cdata])

    def _end(self, cdata: int) -> None:
        known = self._known.pop(cdata, None)
        if known is not None:
            self._write(-known.nbytes, known)

    def _write(self, change: int, known: _Known) -> None:
        self.events.append(Event(change, known.number, known.place, known.owner, self._moment, self._clock()))


def _storages(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    """The memory behind a tensor: of a wrapper (DTensor) that of its parts; of a meta tensor none."""
    if type(tensor) not in _USUAL and is_traceable_wrapper_subclass(tensor):  # type: ignore[unreachable]  # to mypy no tensor is one
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[unreachable]
        return [storage for part in parts if isinstance(part, Tensor) for storage in _storages(part)]
    if tensor.is_meta or tensor.layout is not torch.strided or not _is_plain(tensor):
        return ()
    return (tensor.untyped_storage(),)


def _is_plain(tensor: Tensor) -> bool:
    """Not a wrapper of functorch's, nor of somebody's whose memory is hidden."""
    if type(tensor) not in _USUAL and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return not is_functorch_wrapped(tensor)
