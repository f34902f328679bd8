"""`lowtide.offload`: what autograd saves inside it waits in a store, without recompute."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

import torch

from lowtide.checkpointing.core import as_schedule, is_inside_checkpoint
from lowtide.checkpointing.saving import OneByOne
from lowtide.errors import InvalidValueError
from lowtide.measure import RegionLedger

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Any, Self

    from lowtide.checkpointing.saving import Packed, Schedule
    from lowtide.stores import Store


class offload:  # noqa: N801  (a context manager, used like a function)
    """Offload every tensor that autograd saves in this context.

    Parameters and tensors under 4 KiB stay on the device, and with a store or a `Schedule` so does the last tensor,
    which backward needs first. Inside a checkpoint it does nothing: there, saved tensors are recomputed and never kept.

        with lowtide.offload("host"):
            loss = model(batch)
        loss.backward()
    """

    def __init__(self, store: Literal["host"] | Store | Schedule = "host") -> None:
        schedule = as_schedule(store)
        if schedule is None:
            raise InvalidValueError('offload needs a store: "host", or a store object')
        self.ledger = RegionLedger("offload")
        self._conveyor = OneByOne(schedule)
        self._hooks: AbstractContextManager[Any] = contextlib.nullcontext()

    def __enter__(self) -> Self:
        self._hooks = offload_hooks(self._conveyor, self.ledger)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._conveyor.flush()
        if kind is None:
            self._conveyor.check()


def offload_hooks(conveyor: OneByOne, ledger: RegionLedger) -> AbstractContextManager[Any]:
    """Hooks that put saved tensors on a conveyor. Inside a checkpoint there is nothing to hook: nothing is kept."""
    if is_inside_checkpoint():
        ledger.nested += 1
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: conveyor.pack(tensor, ledger), _unpack)


def _unpack(packed: Packed) -> torch.Tensor:
    return packed.call.unpack(packed)
