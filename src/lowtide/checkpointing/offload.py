"""`lowtide.offload`: what autograd saves inside it waits in a store, without recompute.

Where there are no regions, tensors are offloaded one by one (`PerTensorOffloader`): each is a call in the schedule, and
a bounded number of copies is in flight. Policies with offload alone and selective checkpointing use it, too.
"""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING, Any, Literal

import torch

from lowtide._torch import is_inside_checkpoint, outside_graph
from lowtide.checkpointing.schedule import as_schedule
from lowtide.checkpointing.transforms import refuse_without_hooks
from lowtide.counters import RegionLedger
from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self

    from lowtide.checkpointing.schedule import Packed, RegionCall, Schedule
    from lowtide.stores import Store

IN_FLIGHT = 4
"""Tensors whose copies may be in flight at once: more overlap, against the memory that they hold meanwhile."""


class offload:  # noqa: N801  (a context manager, used like a function)
    """Offload every tensor that autograd saves in this context.

    Parameters and tensors under 4 KiB stay on the device, and with a store or a `Schedule` so does the last tensor,
    which backward needs first. Inside a checkpoint it does nothing: there, saved tensors are recomputed and never kept.

        with lowtide.offload("host"):
            loss = model(batch)
        loss.backward()
    """

    __module__ = "lowtide"

    def __init__(self, store: Literal["host"] | Store | Schedule = "host") -> None:
        schedule = as_schedule(store)
        if schedule is None:
            raise InvalidValueError('offload needs a store: pass "host", or a store object')
        self.ledger = RegionLedger("offload")
        self._offloader = PerTensorOffloader(schedule)
        self._hooks: AbstractContextManager[Any] = contextlib.nullcontext()

    def __enter__(self) -> Self:
        self._hooks = offload_hooks(self._offloader, self.ledger)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._offloader.flush()
        if kind is None:
            self._offloader.check()


def offload_hooks(offloader: PerTensorOffloader, ledger: RegionLedger) -> AbstractContextManager[Any]:
    """Return hooks that hand saved tensors to an offloader; no hooks inside a checkpoint, where nothing is kept."""
    refuse_without_hooks(ledger.name)
    if is_inside_checkpoint():
        ledger.nested += 1
        return contextlib.nullcontext()
    pack = outside_graph(lambda tensor: offloader.pack(tensor, ledger))
    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Packed) -> torch.Tensor:
    return packed.call.unpack(packed)


class PerTensorOffloader:
    """Offloads tensors one by one, with a bounded number of copies in flight."""

    def __init__(self, schedule: Schedule, skip: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._schedule = schedule
        self._skip = skip
        self._in_flight: collections.deque[RegionCall] = collections.deque()
        self._on_host: RegionCall | None = None
        self._moves_something = False

    def pack(self, tensor: torch.Tensor, ledger: RegionLedger) -> Packed:
        """Take a tensor, and start to move the one before it."""
        call = self._schedule.begin(ledger, self._skip, ahead=IN_FLIGHT)
        packed = call.pack(tensor)
        call.on_packed()
        self._on_host = self._on_host if call.on_host is None else call
        self._moves_something |= call.moves_something
        self._in_flight.append(call)
        if len(self._in_flight) > IN_FLIGHT:
            self._in_flight.popleft().on_submitted()
        return packed

    def check(self) -> None:
        """Raise the store's error if every tensor since the last check was in host memory already."""
        on_host, self._on_host = self._on_host, None
        moved, self._moves_something = self._moves_something, False
        if on_host is not None and on_host.on_host is not None and not moved:
            self._schedule.store.require_useful(on_host.on_host, on_host.ledger.name)

    def flush(self) -> None:
        """Release all memory whose copy was started: no more tensors will come."""
        while self._in_flight:
            self._in_flight.popleft().on_submitted()
