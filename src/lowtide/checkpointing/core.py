"""`lowtide.checkpoint`: torch's non-reentrant checkpoint, with every tensor input visible to a store."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import noop_context_fn

from lowtide.checkpointing.buffers import run_once_for_buffers
from lowtide.checkpointing.saving import Schedule
from lowtide.checkpointing.selective import with_offload
from lowtide.compat import non_reentrant_checkpoint, stop_of_recomputation
from lowtide.errors import InvalidValueError
from lowtide.measure import RegionLedger
from lowtide.slots import Frame, take_tensors
from lowtide.stores import HostStore, Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

T = TypeVar("T")


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    offload: Literal["host"] | Store | Schedule | None = None,
    use_reentrant: bool | None = None,  # noqa: ARG001  (see the docstring)
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> T:
    """Run `function(*args, **kwargs)` now and again in backward, instead of keeping what it computes.

    A drop-in for `torch.utils.checkpoint.checkpoint`, whose keywords keep their meaning. Two things differ. The graph
    is always one graph: `use_reentrant=True` is answered with the non-reentrant engine, which saves the same memory
    and fires every parameter's hooks once. And with `offload="host"` (or a store) the inputs leave the device until
    backward, whether they come positionally, as keywords, nested in containers or dataclasses, or bound in a
    `functools.partial`.

    A selective policy (`context_fn`) that asks for CPU offload gets it: torch's eager mode would recompute instead.

    One store serves many calls: pass the same one (or its `Schedule`) to all regions of a model, and a region's copies
    hide behind the next one's compute. The word `"host"` knows of no other call, and copies within its own.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    ledger = RegionLedger(getattr(function, "__qualname__", type(function).__qualname__))
    schedule = as_schedule(offload)
    if context_fn is not None:
        context_fn = with_offload(context_fn, lambda: schedule or Schedule(HostStore()), ledger)
    return run_region(
        function,
        args,
        kwargs,
        ledger=ledger,
        schedule=schedule,
        context_fn=context_fn or noop_context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        preserve_rng_state=preserve_rng_state,
    )


@torch._disable_dynamo  # type: ignore[attr-defined]
def run_region(
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ledger: RegionLedger,
    schedule: Schedule | None,
    skip: Callable[[torch.Tensor], bool] | None = None,
    module: torch.nn.Module | None = None,
    **options: Any,
) -> T:
    """One checkpointed call, with its counts. Its inputs go to the schedule's store; None leaves them on the device.

    `module` is the one whose forward it is, where the function does not tell.

    In a compiled function it is a break of the graph: what is inside runs eagerly, unless it is compiled itself.
    """
    function, args, kwargs = _unbind(function, args, kwargs)
    function = run_once_for_buffers(function, module)
    tensors, frame = take_tensors((args, kwargs))
    replay = _Replay(function, args, kwargs, frame, ledger)
    del args, kwargs
    ledger.forwards += 1
    is_nested = is_inside_checkpoint()
    ledger.nested += is_nested
    if schedule is None or is_nested:
        return non_reentrant_checkpoint(replay, *tensors, **options)  # type: ignore[no-any-return]
    call = schedule.begin(ledger, skip)
    replay.on_entry = call.packed_all
    try:
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            result: T = non_reentrant_checkpoint(replay, *tensors, **options)
    except BaseException:
        schedule.forget(call)
        raise
    call.submitted()
    return result


def as_schedule(offload: Literal["host"] | Store | Schedule | None) -> Schedule | None:
    """What `offload=` means: a word, a store, or a schedule that several regions share."""
    if offload is None or isinstance(offload, Schedule):
        return offload
    if isinstance(offload, Store):
        return _schedule_of(offload)
    if offload == "host":
        return Schedule(HostStore(), alone=True)
    raise InvalidValueError(
        f'offload must be "host", a store such as lowtide.DiskStore("/a/directory"), or None, got {offload!r}'
    )


def _schedule_of(store: Store) -> Schedule:
    """The one that calls with this store share. They hold it, and it the store, which therefore knows it weakly."""
    reference = store.__dict__.get("_schedule")
    schedule: Schedule | None = None if reference is None else reference()
    if schedule is None:
        schedule = Schedule(store)
        store.__dict__["_schedule"] = weakref.ref(schedule)
    return schedule


def is_inside_checkpoint() -> bool:
    """Whether a checkpoint around this one decides what is saved: then its hooks must see the inputs, not a store's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _unbind(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    while isinstance(function, functools.partial):
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    return function, args, kwargs


class _Replay:
    """The function that torch's checkpoint runs: first on the arguments as they came, later on restored tensors.

    After the first run it holds the frame of the arguments, but none of their tensors.
    """

    __slots__ = ("_first", "_frame", "_function", "_ledger", "on_entry")

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame, ledger: RegionLedger
    ) -> None:
        self._function = function
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._frame = frame
        self._ledger = ledger
        self.on_entry: Callable[[], None] | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            if self.on_entry is not None:
                on_entry, self.on_entry = self.on_entry, None
                on_entry()
            return self._function(*args, **kwargs)
        args, kwargs = self._frame.fill(tensors)
        self._ledger.recomputes += 1
        try:
            return self._function(*args, **kwargs)
        except RuntimeError as error:
            raise stop_of_recomputation(error) from error
