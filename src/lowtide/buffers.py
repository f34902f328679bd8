"""What the buffers of a module hold at one moment: running statistics, power iterations, counters.

A forward may change them in place or put another tensor in their place, and running it again would do so twice. What a
module remembers about a tensor that it replaced goes with it: RoPE makes a longer table, and writes down for which
length. Contents are written behind autograd's back (`.data`): a batch norm saves its statistics without reading them in
training, and its own updates are not counted as changes either.

A module that is run again changes its buffers once.

Its first run notes what its changing buffers held before; every later run finds those values, and leaves the buffers as
it found them. So a recomputation computes what forward computed, and running statistics are updated once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from lowtide._torch import NormBase, buffers_of, version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

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
        buffer = buffers_of(module).get(name)
        value, version = (None, 0) if buffer is None else (buffer.detach().clone(), version_of(buffer))
        return cls(module, name, buffer, value, version, attributes, _has_statistics(module))

    @property
    def is_replaced(self) -> bool:
        return buffers_of(self.module).get(self.name) is not self.buffer

    @property
    def is_written(self) -> bool:
        return self.buffer is not None and (self.is_statistic or version_of(self.buffer) != self.version)

    def restore(self, *, content: bool) -> None:
        if self.is_replaced:
            buffers_of(self.module)[self.name] = self.buffer
            _put_back(vars(self.module), self.attributes)
        if content and self.buffer is not None and self.value is not None:
            self.buffer.data.copy_(self.value)


class Snapshot:
    """The buffers of a module that a forward may change, and what they hold: no masks, no packed weights."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            _Slot.of(part, name, attributes)
            for part in module.modules()
            if buffers_of(part) and (attributes := dict(vars(part)))
            for name, buffer in buffers_of(part).items()
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
    return isinstance(module, NormBase) and module.training and module.track_running_stats


def run_once_for_buffers(function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """`function`, changing the buffers of its module once: of the one given, of itself, or of the one that it is of."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    owner = module if module is not None else owner
    if not isinstance(owner, nn.Module) or next(owner.buffers(), None) is None:
        return function
    return _OnceForBuffers(function, owner)


class _OnceForBuffers:
    """A module's forward, run again and again."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self._function = function
        self._module = module
        self._before: Snapshot | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is None:
            before = Snapshot(self._module)
            result = self._function(*args, **kwargs)
            self._before = before.changed()
            return result
        after = self._before.again()
        self._before.restore()
        try:
            return self._function(*args, **kwargs)
        finally:
            after.restore()
