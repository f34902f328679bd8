"""`lowtide.offload`: what autograd saves inside it waits in a store, without recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from lowtide.checkpointing.core import as_schedule, is_inside_checkpoint
from lowtide.checkpointing.saving import OneByOne
from lowtide.errors import InvalidValueError
from lowtide.measure import RegionLedger

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.checkpointing.saving import Packed, Schedule
    from lowtide.stores import Store


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
        self._conveyor = OneByOne(schedule, self.ledger, skip)
        self._active = False
        super().__init__(self._conveyor.pack, _unpack)

    def __enter__(self) -> None:
        self._active = not is_inside_checkpoint()
        if self._active:
            super().__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._active:
            super().__exit__(*exception)
            self._conveyor.flush()


def _unpack(packed: Packed) -> torch.Tensor:
    return packed.call.unpack(packed)
