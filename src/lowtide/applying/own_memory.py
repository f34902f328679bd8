"""Which memory is a model's own: moving a parameter or a buffer away would free nothing."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


class OwnMemory:
    """The addresses of a model's parameters and buffers, looked up again once in a while, for models do move.

    A stale address costs a copy too many or too few; it never changes a result.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._addresses: set[int] | None = None
        self._entered: set[str] = set()

    def enter(self, region: str) -> None:
        """A region runs. One that comes again begins a new round: time to look again."""
        if self._addresses is None or region in self._entered:
            self._entered.clear()
            self._look()
        self._entered.add(region)

    def _look(self) -> None:
        model = self._model()
        if model is not None:
            own = itertools.chain(model.parameters(), model.buffers())
            self._addresses = {_address(tensor) for tensor in own if type(tensor) in (torch.nn.Parameter, torch.Tensor)}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a parameter or a buffer."""
        return self._addresses is not None and _address(tensor) in self._addresses


def _address(tensor: torch.Tensor) -> int:
    """Where its memory is. Tensors of a plan have none, and are told apart by their storages instead.

    A storage is no name for memory that comes and goes: ZeRO-3 makes a new one for each gathered weight, and the next
    activation's may be where it was.
    """
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.device.type == "meta" else storage.data_ptr()
