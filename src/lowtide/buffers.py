"""Lets a module that is run again change its buffers once: running statistics, power iterations, counters.

A forward may change buffers in place or replace them by other tensors, and running it again would do so twice. So the
first run notes what its changing buffers held before; every later run finds those values, and leaves the buffers as it
found them. A recompute then computes what forward computed, and running statistics are updated once.

A module's plain attributes are put back along with a buffer that it replaced: RoPE makes a longer table, and notes in
an attribute for which length. Contents are written without autograd's knowledge (`.data`): a batch norm saves its
statistics without reading them in training, and its own updates are not counted as changes either.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from lowtide._torch import NormBase, buffers_of, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

PACKED_BYTES = 1024**2
"""Integers of this size are not counters: they are a quantized layer's weights."""


def run_once_for_buffers(function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """Wrap `function` so that its module's buffers change once, however often it is run.

    The module is `module`, `function` itself, or the object that it is a bound method of.
    """
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    owner = module if module is not None else owner
    if not isinstance(owner, nn.Module) or next(owner.buffers(), None) is None:
        return function
    return _OnceForBuffers(function, owner)


def buffers_behind(function: Callable[..., Any]) -> Iterator[Tensor]:
    """Yield the buffers that a function of `run_once_for_buffers` puts back; none for any other function."""
    return function.module.buffers() if isinstance(function, _OnceForBuffers) else iter(())


class _OnceForBuffers:
    """A module's forward that may be run several times."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self._function = function
        self.module = module
        self._before: Snapshot | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is None:
            before = Snapshot(self.module)
            result = self._function(*args, **kwargs)
            self._before = before.changed()
            return result
        after = self._before.again()
        self._before.restore()
        try:
            return self._function(*args, **kwargs)
        finally:
            after.restore()


class Snapshot:
    """The buffers that a module's forward may change, and what they hold; masks and packed weights are left out."""

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
        """Return a snapshot of only the buffers that have changed since, with what they held before."""
        written = {slot for slot in self._slots if slot.is_written}
        return self._with([slot for slot in self._slots if slot.is_replaced or slot in written], written)

    def again(self) -> Self:
        """Return a snapshot of the same buffers with what they hold now."""
        slots = [_Slot.of(slot.module, slot.name, dict(vars(slot.module))) for slot in self._slots]
        pairs = zip(self._slots, slots, strict=True)
        return self._with(slots, {now for before, now in pairs if before in self._written and not before.is_replaced})

    def restore(self) -> None:
        """Put the buffers back. Contents are copied only for those that are written to: replaced ones keep theirs."""
        for slot in self._slots:
            slot.restore(content=slot in self._written)

    def _with(self, slots: list[_Slot], written: set[_Slot]) -> Self:
        other = object.__new__(type(self))
        other._slots, other._written = slots, written
        return other


@dataclasses.dataclass(frozen=True, eq=False)
class _Slot:
    """A buffer of one module, its content, and the module's attributes at that moment."""

    module: nn.Module
    name: str
    buffer: Tensor | None
    value: Tensor | None
    version: int
    attributes: dict[str, Any]
    is_statistic: bool
    """Whether a norm updates it in a fused operator, which does not count as a change of the tensor."""

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
            _restore_attributes(vars(self.module), self.attributes)
        if content and self.buffer is not None and self.value is not None:
            self.buffer.data.copy_(self.value)


def _restore_attributes(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)


def may_change(buffer: Tensor) -> bool:
    """Return whether a forward may change a buffer: masks and a quantized layer's packed weights stay as they are."""
    if buffer.dtype is torch.bool:
        return False
    is_integer = not (buffer.is_floating_point() or buffer.is_complex())
    return not is_integer or buffer.nbytes < PACKED_BYTES


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, NormBase) and module.training and module.track_running_stats
