"""Notes the buffers of a module, and puts them back: running statistics, power iterations, tables, counters.

A forward may change buffers in place or replace them by other tensors, and running it again would do so twice. So the
first run notes what its buffers held before; every later run finds those values, and leaves the buffers as it found
them. A recompute then computes what forward computed, and running statistics are updated once.

A module's plain attributes are put back along with a buffer that it replaced: RoPE makes a longer table, and notes in
an attribute for which length. Contents are written without autograd's knowledge (`.data`): a batch norm saves its
statistics without reading them in training, and its own updates are not counted as changes either.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from lowtide._torch import NormBase, buffers_of, version_if_any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

SMALL_BYTES = 8 * 1024
"""What buffers up to this size held in forward is kept until backward, whether or not anything changes them."""

PACKED_BYTES = 1024**2
"""Integers of this size are not counters: they are a quantized layer's weights."""


class Snapshot:
    """The buffers of a module's parts. Of large masks and packed weights, no contents are kept.

    With `copies_large=False`, the contents of small ones alone are.
    """

    def __init__(self, parts: Iterable[nn.Module], *, copies_large: bool = True) -> None:
        self._slots = [
            _Slot.of(part, name, attributes, copies_large=copies_large)
            for part in dict.fromkeys(parts)
            if buffers_of(part) and (attributes := _attributes(part))
            for name, buffer in buffers_of(part).items()
            if buffer is not None
        ]
        self._written: set[_Slot] = set()

    def changed(self) -> Self:
        """Return a snapshot of only the buffers that have changed since, with what they held before."""
        written = {slot for slot in self._slots if slot.is_written}
        return self._with([slot for slot in self._slots if slot.is_replaced or slot in written], written)

    def noted(self, is_written_unseen: Callable[[nn.Module, str, Tensor], bool]) -> Self:
        """Return a snapshot to run a forward again from, made when it has run for the first time.

        Buffers that it changed are noted with what they held before, as are those that it may write to unseen, and
        small ones, which somebody may change before backward; of larger ones only the tensor and its version
        (`watched`). A mask or packed weights that the forward itself has changed are left to it.
        """
        changed = self.changed()
        slots, written = [slot for slot in changed._slots if slot.value is not None], set(changed._written)
        for slot in set(self._slots) - set(changed._slots):
            is_unseen = slot.can_be_written and (
                slot.is_small or is_written_unseen(slot.module, slot.name, slot.buffer)  # type: ignore[arg-type]
            )
            value = slot.value if is_unseen or slot.is_small else None
            slots.append(dataclasses.replace(slot, value=value, attributes=None))
            written |= {slots[-1]} if is_unseen else set()
        return self._with(slots, written)

    def watched(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers whose contents were not noted, by name: whoever runs the forward again must watch them."""
        for slot in self._slots:
            if slot.value is None and slot.buffer is not None:
                yield slot.name, slot.buffer

    def unseen_changes(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the buffers that were written to since, though neither their versions nor their modules tell."""
        for slot in self._slots:
            if slot.is_replaced or slot.is_written or slot.buffer is None or slot.value is None:
                continue
            if not slot.buffer.is_meta and not torch.equal(slot.buffer, slot.value):
                yield slot.module, slot.name

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the module find its buffers inside as they were noted, and leave them as they are now.

        It finds copies: what is saved for backward inside must not change when the buffers are put back.
        """
        written = self._written | {slot for slot in self._slots if slot.is_written}
        now = [slot.again() for slot in self._slots]
        copies: dict[int, Tensor] = {}
        for slot in self._slots:
            slot.restore(slot.copied(copies) if slot in written else slot.buffer)
        try:
            yield
        finally:
            for after in now:
                after.restore(after.buffer)

    def restore(self) -> None:
        """Put the buffers back. Contents are copied only for those that are written to: replaced ones keep theirs."""
        for slot in self._slots:
            slot.restore(slot.buffer)
            if slot in self._written and slot.can_be_written and slot.value is not None:
                slot.buffer.data.copy_(slot.value)  # type: ignore[union-attr]

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
    attributes: dict[str, Any] | None
    """None if they are not to be put back."""
    is_statistic: bool
    """Whether a norm updates it in a fused operator, which does not count as a change of the tensor."""

    @classmethod
    def of(cls, module: nn.Module, name: str, attributes: dict[str, Any] | None, *, copies_large: bool) -> Self:
        buffer = buffers_of(module).get(name)
        is_copied = buffer is not None and (may_change(buffer) if copies_large else buffer.nbytes <= SMALL_BYTES)
        value = buffer.detach().clone() if buffer is not None and is_copied else None
        version = 0 if buffer is None else version_if_any(buffer)
        return cls(module, name, buffer, value, version, attributes, _has_statistics(module))

    @property
    def is_small(self) -> bool:
        return self.buffer is not None and self.buffer.nbytes <= SMALL_BYTES

    @property
    def can_be_written(self) -> bool:
        """Whether each of its elements has a place of its own, unlike those of an expanded tensor."""
        if self.buffer is None or self.buffer.is_inference():
            return False
        return 0 not in self.buffer.stride() or self.buffer.numel() <= 1

    def again(self) -> Self:
        """Return what the module holds now in this place."""
        attributes = None if self.attributes is None else _attributes(self.module)
        held = buffers_of(self.module).get(self.name)
        return dataclasses.replace(self, buffer=held, value=None, attributes=attributes)

    def copied(self, copies: dict[int, Tensor]) -> Tensor | None:
        """Return a copy of the noted contents, the same one for a buffer that is held twice."""
        if self.buffer is None or self.value is None:
            return self.buffer
        if id(self.buffer) not in copies:
            copies[id(self.buffer)] = self.value.clone().requires_grad_(self.buffer.requires_grad)
        return copies[id(self.buffer)]

    @property
    def is_replaced(self) -> bool:
        return buffers_of(self.module).get(self.name) is not self.buffer

    @property
    def is_written(self) -> bool:
        return self.buffer is not None and (self.is_statistic or version_if_any(self.buffer) != self.version)

    def restore(self, buffer: Tensor | None) -> None:
        """Put a tensor into this place, and the attributes back if there was another one."""
        if self.is_replaced and self.attributes is not None:
            _restore_attributes(vars(self.module), self.attributes)
        if buffers_of(self.module).get(self.name) is not buffer:
            buffers_of(self.module)[self.name] = buffer


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds, but for tensors with a graph: it holds the snapshot, and would never be freed."""
    return {name: value for name, value in vars(module).items() if not _has_graph(value)}


def _restore_attributes(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name, value in now.items() if name not in before and not _has_graph(value)]:
        del now[name]
    now.update(before)


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def may_change(buffer: Tensor) -> bool:
    """Return whether a forward may change a buffer: masks and a quantized layer's packed weights stay as they are."""
    if buffer.dtype is torch.bool:
        return buffer.nbytes <= SMALL_BYTES
    is_integer = not (buffer.is_floating_point() or buffer.is_complex())
    return not is_integer or buffer.nbytes < PACKED_BYTES


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, NormBase) and module.training and module.track_running_stats
