"""`lowtide.offload`: what autograd saves inside it waits in a store, without recompute."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Literal

import torch

from lowtide.checkpointing.core import as_schedule, is_inside_checkpoint
from lowtide.errors import InvalidValueError
from lowtide.measure import RegionLedger

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.checkpointing.saving import Call, Schedule
    from lowtide.stores import Store

IN_FLIGHT = 4
"""Saved tensors whose copy may be under way at once: more overlap, against the memory that they hold meanwhile."""


class offload(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801  (a context manager, used like a function)
    """Offload every tensor that autograd saves in this context.

    Parameters, tensors under 4 KiB, and the last few tensors, which backward needs first, stay on the device. Inside a
    checkpoint it does nothing: there, saved tensors are recomputed and never kept.

        with lowtide.offload("host"):
            loss = model(batch)
        loss.backward()
    """

    def __init__(
        self,
        store: Literal["host"] | Store | Schedule = "host",
        *,
        ledger: RegionLedger | None = None,
        skip: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        schedule = as_schedule(store)
        if schedule is None:
            raise InvalidValueError('offload needs a store: "host", or a store object')
        self.ledger = ledger or RegionLedger("offload")
        self._schedule = schedule
        self._skip = skip
        self._in_flight: collections.deque[Call] = collections.deque()
        super().__init__(self._pack, _unpack)

    def __enter__(self) -> None:
        self._active = not is_inside_checkpoint()
        if self._active:
            super().__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._active:
            super().__exit__(*exception)
        while self._in_flight:
            self._in_flight.popleft().submitted()

    def _pack(self, tensor: torch.Tensor) -> object:
        call = self._schedule.begin(self.ledger, self._skip)
        packed = call.pack(tensor)
        call.packed_all()
        self._in_flight.append(call)
        if len(self._in_flight) > IN_FLIGHT:
            self._in_flight.popleft().submitted()
        return packed


def _unpack(packed: object) -> torch.Tensor:
    return packed.call.unpack(packed)  # type: ignore[attr-defined, no-any-return]
