"""What the buffers of a module hold at one moment: running statistics, power iterations, counters.

A forward may change them in place or put another tensor in their place, and running it again would do so twice. They
are written behind autograd's back (`.data`): a batch norm saves its statistics without reading them in training, and
its own updates are not counted as changes either.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKED_BYTES = 1024**2
"""Whole numbers of this size are no counters: they are a quantized layer's weights."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Slot:
    """A buffer of one module, and what was in it."""

    holder: dict[str, Any]
    name: str
    buffer: Tensor
    value: Tensor
    version: int
    is_statistic: bool

    @property
    def was_changed(self) -> bool:
        """Norms update their statistics in one fused operator, which does not count as a change of the tensor."""
        is_replaced = self.holder.get(self.name) is not self.buffer
        return is_replaced or self.is_statistic or self.buffer._version != self.version

    def restore(self) -> None:
        self.holder[self.name] = self.buffer
        self.buffer.data.copy_(self.value)


class Snapshot:
    """The buffers of a module that a forward may change, and what they hold: no masks, no packed weights."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            _Slot(part._buffers, name, buffer, buffer.detach().clone(), buffer._version, _has_statistics(part))
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and may_change(buffer)
        ]

    def changed(self) -> Self:
        """Those that changed since, and what they held."""
        return self._of([slot for slot in self._slots if slot.was_changed])

    def again(self) -> Self:
        """The same buffers, and what they hold now."""
        now = [(slot, slot.holder[slot.name]) for slot in self._slots]
        return self._of(
            [
                dataclasses.replace(slot, buffer=buffer, value=buffer.detach().clone(), version=buffer._version)
                for slot, buffer in now
            ]
        )

    def restore(self) -> None:
        for slot in self._slots:
            slot.restore()

    def _of(self, slots: list[_Slot]) -> Self:
        twin = object.__new__(type(self))
        twin._slots = slots
        return twin


def may_change(buffer: Tensor) -> bool:
    if buffer.dtype is torch.bool:
        return False
    is_whole = not (buffer.is_floating_point() or buffer.is_complex())
    return not is_whole or buffer.nbytes < PACKED_BYTES


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training and module.track_running_stats
