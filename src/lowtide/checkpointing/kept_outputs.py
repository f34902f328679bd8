"""Holds the outputs of dear operators from a region's forward to its recompute.

They belong to one call of the region, and so to its graph. With offload they are packed like the region's inputs: they
leave the device and come back with them. An output whose memory the forward changes in place after it was kept is let
go, and computed again; one that is changed later is refused, as autograd would have done.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch import alias_of, storage_key, version_of
from lowtide.checkpointing.kept_operators import name_of
from lowtide.checkpointing.schedule import version_probe
from lowtide.errors import InPlaceError, LowtideError
from lowtide.randomness import RandomState
from lowtide.tensor_tree import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.checkpointing.kept_operators import KeptOperators
    from lowtide.checkpointing.schedule import Packed, RegionCall
    from lowtide.counters import RegionLedger
    from lowtide.tensor_tree import TensorTree

COMPUTE = object()
"""Stands for an output that was not kept after all."""


class KeptOutputs:
    """The outputs that one call of a region keeps, by operator or by another key, in order."""

    def __init__(self, operators: KeptOperators, ledger: RegionLedger) -> None:
        self.operators = operators
        self.ledger = ledger
        self.call: RegionCall | None = None
        """The region's call in a schedule, if what is kept is offloaded with its inputs."""
        self.on_recall: Callable[[list[torch.Tensor]], None] | None = None
        """Told of the tensors of each output that is recalled, if anybody wants to know."""
        self._entries: dict[Any, list[_Entry | None]] = collections.defaultdict(list)
        self._newest: tuple[_Entry, list[int]] | None = None
        """The output that was kept last, and the storages of its tensors."""

    @property
    def count(self) -> int:
        """How many outputs were kept."""
        return sum(map(len, self._entries.values()))

    def keep(self, key: Any, operator: Any, output: Any, args: tuple[Any, ...], position: int = 0) -> None:
        """Keep an output of `operator`. Outputs with one key are recalled in the order in which they were kept."""
        tensors, tree = ([output], None) if isinstance(output, torch.Tensor) else flatten(output)
        state = RandomState(*tensors) if self.operators.draws(operator, args) else None
        packed = [self._pack(tensor) for tensor in tensors]
        entry = _Entry(name_of(operator), packed, tree, state, position, [])
        self._entries[key].append(entry)
        self._newest = (entry, [storage_key(tensor.untyped_storage()) for tensor in tensors])
        self.ledger.kept_outputs += 1

    def watch(self, view: torch.Tensor) -> None:
        """Take note of changes in place of a tensor that may share memory with the newest output."""
        if self._newest is not None and storage_key(view.untyped_storage()) in self._newest[1]:
            self._newest[0].probes.append((version_probe(view), version_of(view)))

    def recall(self, key: Any, operator: Any, index: int) -> Any:
        """Return the output that was kept as number `index` of its key; `COMPUTE` if it has to be computed again."""
        entries = self._entries.get(key, ())
        if index >= len(entries):
            raise LowtideError(
                f"region {self.ledger.name!r}: its recompute calls {name_of(operator)} more often than its forward "
                f"did, which was {len(entries)} times, so it is not clear which output is which. Make the forward do "
                "the same whenever it runs, or leave the operator out of keep="
            )
        entry = entries[index]
        if entry is None:
            return COMPUTE
        if entry.is_changed:
            raise InPlaceError(
                f"region {self.ledger.name!r}: the output of {entry.operator}, which keep= keeps, was modified by an "
                "inplace operation after the region's forward. Modify a copy of it, for example x = x + 1 instead of "
                f"x += 1, or leave {entry.operator} out of keep="
            )
        self.ledger.recalled_outputs += 1
        return entry.get(self.on_recall)

    def position(self, key: Any) -> int | None:
        """Return which product of a function's call was kept, if one was."""
        entries = self._entries.get(key)
        return entries[0].position if entries and entries[0] is not None else None

    def drop_changed(self) -> set[str]:
        """Let go of outputs that were changed in place, which have to be computed again. Returns their operators."""
        dropped = set()
        for entries in self._entries.values():
            for index, entry in enumerate(entries):
                if entry is not None and entry.is_changed:
                    entries[index] = None
                    self.ledger.kept_outputs -= 1
                    dropped.add(entry.operator)
        return dropped

    def _pack(self, tensor: torch.Tensor) -> _Held | Packed:
        alias = alias_of(tensor)
        if self.call is None:
            return _Held(alias, version_of(alias))
        return self.call.pack(alias)


class _Entry(NamedTuple):
    """One kept output: its tensors, where they belong, and the random state after an operator that draws."""

    operator: str
    packed: list[_Held | Packed]
    tree: TensorTree | None
    state: RandomState | None
    position: int
    probes: list[tuple[torch.Tensor, int]]
    """Tensors without memory whose version says whether another view was changed, and that version."""

    @property
    def is_changed(self) -> bool:
        """Whether its memory was changed in place since it was kept."""
        is_packed_changed = any(packed.is_changed for packed in self.packed)
        return is_packed_changed or any(version_of(probe) != version for probe, version in self.probes)

    def get(self, on_recall: Callable[[list[torch.Tensor]], None] | None) -> Any:
        """Return the output, as new tensors over the same memory, of which `on_recall` is told."""
        if self.state is not None:
            self.state.set()
        tensors = [alias_of(packed.get()) for packed in self.packed]
        if on_recall is not None:
            on_recall(tensors)
        return tensors[0] if self.tree is None else self.tree.unflatten(tensors)


class _Held(NamedTuple):
    """A kept tensor that stays on the device, and the version that it had."""

    tensor: torch.Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since."""
        return version_of(self.tensor) != self.version

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        return self.tensor
