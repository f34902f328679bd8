"""Makes selective checkpointing honour a policy that asks for CPU offload.

Torch's policies may answer `MUST_CPU_OFFLOAD` or `PREFER_CPU_OFFLOAD` for an operator's output, and its eager mode
silently recomputes those. The outputs that a policy keeps live in a dictionary that no saved-tensor hook sees, so they
are offloaded where they are put into that dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy

from lowtide._torch import OFFLOAD_POLICIES, CachingMode, is_selective_cache, rename_offload_policies
from lowtide.checkpointing.offload import PerTensorOffloader

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch

    from lowtide.checkpointing.schedule import Packed, Schedule
    from lowtide.counters import RegionLedger

    Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def with_offload(
    context_fn: Callable[[], Contexts], schedule: Callable[[], Schedule], ledger: RegionLedger
) -> Callable[[], Contexts]:
    """Wrap `context_fn` so that torch's cache of kept outputs can offload; other contexts pass through unchanged."""

    def contexts() -> Contexts:
        forward, recompute = context_fn()
        if OFFLOAD_POLICIES and is_selective_cache(forward):
            forward = _OffloadingCache(forward, schedule, ledger)
            rename_offload_policies(recompute)
        return forward, recompute

    return contexts


def entered_after(before: Callable[[], None], context_fn: Callable[[], Contexts]) -> Callable[[], Contexts]:
    """Wrap `context_fn` so that `before` comes just before its forward context: a policy must not see our own copies.

    Torch has saved the inputs by then, and its own hooks are around. Torch's cache stays what it is: since 2.14 it is
    told about other hooks.
    """

    def contexts() -> Contexts:
        forward, recompute = context_fn()
        if isinstance(forward, _OffloadingCache):
            forward.before = before
            return forward, recompute
        return _EnteredAfter(before, forward), recompute

    return contexts


class _EnteredAfter:
    def __init__(self, before: Callable[[], None], context: AbstractContextManager[Any]) -> None:
        self._before = before
        self._context = context

    def __enter__(self) -> Any:
        self._before()
        return self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._context.__exit__(kind, error, trace)


class _Decision:
    """A policy that says "keep" where the user's says "offload", and remembers the difference.

    It is an object of its own: if the cache handed a method of itself to its base class, it would be a cycle, and hold
    what it keeps until Python's collector comes.
    """

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy
        self.wants_offload = False

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        policy = self._policy(context, operator, *args, **kwargs)
        self.wants_offload = policy in OFFLOAD_POLICIES
        return CheckpointPolicy.MUST_SAVE if self.wants_offload else policy


class _OffloadingCache(CachingMode):
    """Torch's cache of kept outputs, except that those for which the policy says offload are handed to a store."""

    def __init__(self, cache: Any, schedule: Callable[[], Schedule], ledger: RegionLedger) -> None:
        self._decision = _Decision(cache.policy_fn)
        super().__init__(cache, self._decision)
        self._schedule = schedule
        self._ledger = ledger
        self._offloader: PerTensorOffloader | None = None
        self.before: Callable[[], None] = _nothing
        """What comes before it is entered."""

    def __enter__(self) -> Any:
        self.before()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._decision.wants_offload = False
        output = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self._decision.wants_offload:
            self.replace_newest(func, args, self._offload)
        return output

    def _offload(self, kept: torch.Tensor) -> _Offloaded:
        if self._offloader is None:
            self._offloader = PerTensorOffloader(self._schedule())
        return _Offloaded(self._offloader.pack(kept, self._ledger))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._offloader is None:
            return
        self._offloader.flush()
        if exception[0] is None:
            self._offloader.check()


def _nothing() -> None:
    """Do nothing."""


class _Offloaded:
    """An offloaded output in torch's cache, with the one method that torch calls on its entries."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def get_val(self, _allow_mutation: bool) -> torch.Tensor:
        return self._packed.call.unpack(self._packed)
