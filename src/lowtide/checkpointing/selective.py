"""Selective checkpointing with offload: a policy that asks for CPU offload gets it.

Torch's policies may say `MUST_CPU_OFFLOAD` or `PREFER_CPU_OFFLOAD` of an operator's output. Its eager mode silently
recomputes those. The outputs that a policy keeps live in a dictionary that no saved-tensor hook sees, so they are
offloaded where they are put into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    _sac_storage_key,
    _VersionWrapper,
)

from lowtide.checkpointing.saving import OneByOne

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lowtide.checkpointing.saving import Packed, Schedule
    from lowtide.measure import RegionLedger

    Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


def with_offload(
    context_fn: Callable[[], Contexts], schedule: Callable[[], Schedule], ledger: RegionLedger
) -> Callable[[], Contexts]:
    """`context_fn`, with torch's cache of kept outputs replaced by one that can offload; others pass through."""

    def contexts() -> Contexts:
        forward, recompute = context_fn()
        if isinstance(forward, _CachingTorchDispatchMode):
            forward = _OffloadingCache(forward, schedule, ledger)
        return forward, recompute

    return contexts


class _OffloadingCache(_CachingTorchDispatchMode):
    """Torch's cache, except that outputs for which the policy says offload are handed to a store."""

    def __init__(
        self, cache: _CachingTorchDispatchMode, schedule: Callable[[], Schedule], ledger: RegionLedger
    ) -> None:
        super().__init__(self._decide, cache.storage, cache.ac_graph_id)  # type: ignore[no-untyped-call]
        self._policy = cache.policy_fn
        self._schedule = schedule
        self._ledger = ledger
        self._conveyor: OneByOne | None = None
        self._asked = False

    def _decide(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        policy = self._policy(context, operator, *args, **kwargs)
        self._asked = policy in _OFFLOAD
        return CheckpointPolicy.MUST_SAVE if self._asked else policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._asked = False
        output = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self._asked:
            key = _sac_storage_key(func, args)  # type: ignore[no-untyped-call]
            entries = self.storage[key]
            newest = self.func_counter[key] - 1
            entries[newest] = tree_map(self._offload, entries[newest])
        return output

    def _offload(self, kept: Any) -> Any:
        if not isinstance(kept, _VersionWrapper) or not isinstance(kept.val, torch.Tensor):
            return kept
        if self._conveyor is None:
            self._conveyor = OneByOne(self._schedule())
        return _Offloaded(self._conveyor.pack(kept.val, self._ledger))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._conveyor is None:
            return
        self._conveyor.flush()
        if exception[0] is None:
            self._conveyor.check()


class _Offloaded:
    """Stands in torch's cache for a kept output; it has the one method that torch calls."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def get_val(self, _allow_mutation: bool) -> torch.Tensor:
        return self._packed.call.unpack(self._packed)
