"""What the buffers of a module hold at one moment: running statistics, power iterations, counters.

A forward may change them in place or put another tensor in their place, and running it again would do so twice. What a
module remembers about a tensor that it replaced goes with it: RoPE makes a longer table, and writes down for which
length. Contents are written behind autograd's back (`.data`): a batch norm saves its statistics without reading them in
training, and its own updates are not counted as changes either.
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
    """A buffer of one module, what was in it, and what else the module held."""

    module: nn.Module
    name: str
    buffer: Tensor | None
    value: Tensor | None
    version: int
    attributes: dict[str, Any]
    is_statistic: bool
    """Norms update these in one fused operator, which does not count as a change of the tensor."""

    @classmethod
    def of(cls, module: nn.Module, name: str, attributes: dict[str, Any]) -> Self:
        buffer = module._buffers.get(name)
        value, version = (None, 0) if buffer is None else (buffer.detach().clone(), buffer._version)
        return cls(module, name, buffer, value, version, attributes, _has_statistics(module))

    @property
    def is_replaced(self) -> bool:
        return self.module._buffers.get(self.name) is not self.buffer

    @property
    def is_written(self) -> bool:
        return self.buffer is not None and (self.is_statistic or self.buffer._version != self.version)

    def restore(self, *, content: bool) -> None:
        if self.is_replaced:
            self.module._buffers[self.name] = self.buffer
            _put_back(vars(self.module), self.attributes)
        if content and self.buffer is not None and self.value is not None:
            self.buffer.data.copy_(self.value)


class Snapshot:
    """The buffers of a module that a forward may change, and what they hold: no masks, no packed weights."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            _Slot.of(part, name, attributes)
            for part in module.modules()
            if part._buffers and (attributes := dict(vars(part)))
            for name, buffer in part._buffers.items()
            if buffer is not None and may_change(buffer)
        ]
        self._written: set[_Slot] = set()

    def changed(self) -> Self:
        """Those that changed since, and what they held."""
        written = {slot for slot in self._slots if slot.is_written}
        return self._of([slot for slot in self._slots if slot.is_replaced or slot in written], written)

    def again(self) -> Self:
        """The same buffers, and what they hold now."""
        slots = [_Slot.of(slot.module, slot.name, dict(vars(slot.module))) for slot in self._slots]
        pairs = zip(self._slots, slots, strict=True)
        return self._of(slots, {now for before, now in pairs if before in self._written and not before.is_replaced})

    def restore(self) -> None:
        """Contents only of those that are written to: what is replaced keeps its own."""
        for slot in self._slots:
            slot.restore(content=slot in self._written)

    def _of(self, slots: list[_Slot], written: set[_Slot]) -> Self:
        twin = object.__new__(type(self))
        twin._slots, twin._written = slots, written
        return twin


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)


def may_change(buffer: Tensor) -> bool:
    if buffer.dtype is torch.bool:
        return False
    is_whole = not (buffer.is_floating_point() or buffer.is_complex())
    return not is_whole or buffer.nbytes < PACKED_BYTES


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training and module.track_running_stats
