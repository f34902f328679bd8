"""`lowtide.checkpoint`: torch's non-reentrant checkpoint, with every tensor input visible to a store.

Torch's checkpoint saves only top-level positional tensors where hooks can see them. So a call's arguments are taken
apart into tensors and a tree (`tensor_tree`): torch gets a function of plain tensors (`_Replay`), a store's hooks see
each of them, and the recompute puts the restored tensors back into the tree.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import noop_context_fn

from lowtide._torch import (
    CHECKPOINT_HOOKS,
    CHECKPOINT_KEYWORDS,
    CheckpointSettings,
    CompiledCall,
    attention_choice,
    attention_chosen,
    checkpoint_hooks,
    graph_break,
    hooks_module,
    pop_hooks,
    recomputation_stop,
    send_compiler_away,
    swap_compiler,
    transforms_around,
    uncompiled,
)
from lowtide.checkpointing.forward_state import ForwardState, Habits, state_of
from lowtide.checkpointing.frame import run_checkpoint
from lowtide.checkpointing.keeping import keeping_of
from lowtide.checkpointing.kept_operators import KeptOperators
from lowtide.checkpointing.saved_versions import SavedBytes, check_handed_out, note_saved
from lowtide.checkpointing.schedule import Schedule, as_schedule
from lowtide.checkpointing.selective import entered_after, with_offload
from lowtide.checkpointing.transforms import (
    refuse_other_attention,
    refuse_to_move,
    refuse_to_run_again,
    refuse_without_hooks,
)
from lowtide.counters import RegionLedger
from lowtide.errors import InvalidValueError
from lowtide.policy.text import check_kept, read_kept
from lowtide.stores import HostStore, Store
from lowtide.tensor_tree import TensorTree, flatten_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from lowtide.checkpointing.keeping import Keeping, KeptCall
    from lowtide.weights import RefuseSaved

T = TypeVar("T")


@overload
def checkpoint(
    function: Callable[..., T],
    *args: Any,
    offload: Literal["host"] | Store | Schedule | None = None,
    keep: str | Sequence[str] = (),
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> T: ...
@overload
def checkpoint(
    *,
    offload: Literal["host"] | Store | Schedule | None = None,
    keep: str | Sequence[str] = (),
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...
def checkpoint(
    function: Callable[..., T] | None = None,
    *args: Any,
    offload: Literal["host"] | Store | Schedule | None = None,
    keep: str | Sequence[str] = (),
    use_reentrant: bool | None = None,  # noqa: ARG001  (see the docstring)
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> T | Callable[[Callable[..., T]], Callable[..., T]]:
    """Run `function(*args, **kwargs)` now and again in backward, instead of keeping what it computes.

    A drop-in for `torch.utils.checkpoint.checkpoint`, whose keywords keep their meaning. These things differ:

    - The graph is always one graph: `use_reentrant=True` runs the non-reentrant engine as well, which saves the same
      memory and fires every parameter's hooks once; it may be left out without a warning, and given with `context_fn`.
    - Tensors among keywords and in containers are inputs like positional ones: one that is changed in place before
      backward is refused, where torch would compute with the changed one. So are weights.
    - With `offload="host"` (or a store) the inputs leave the device until backward, whether they are positional,
      keywords, nested in containers or dataclasses, or bound in a `functools.partial`.

    Without a function it returns a wrapper, as torch 2.14 does: `checkpoint(use_reentrant=False)(function)(*args)`.

    With `keep="attention"` the outputs of attention are kept instead of computed again, as a policy with
    `recompute(keep=attention)` does; `"attention+matmul"` and names of operators are taken, too. With `offload`
    they leave with the inputs.

    A selective policy (`context_fn`) that asks for CPU offload gets it: torch's eager mode would recompute instead.
    What a selective policy keeps is not seen by saved-tensor hooks around the call, unless
    `respect_saved_tensors_hooks=True` says so (torch 2.14 and newer).

    One store serves many calls: pass the same one (or its `Schedule`) to all regions of a model, and a region's copies
    hide behind the next region's compute. With the word `"host"` each call stands alone, and copies during its own
    forward.
    """
    if kwargs or respect_saved_tensors_hooks:
        _check_keywords(kwargs, respect_saved_tensors_hooks)
    settings = CheckpointSettings(
        preserve_rng_state, context_fn or noop_context_fn, determinism_check, debug, early_stop
    )
    kept = _kept_operators(keep) if keep else None
    if kept is not None and context_fn is not None:
        raise InvalidValueError("keep and context_fn both say what is kept: give one of them")
    if function is None:
        if args or kwargs:
            raise InvalidValueError(
                "checkpoint without a function returns a wrapper and accepts settings only, but got "
                f"{_listed(args, kwargs)}: pass arguments to the wrapped function"
            )
        as_schedule(offload)  # refused now rather than at the first call
        return functools.partial(_wrap, offload, kept, settings, respect_saved_tensors_hooks)
    return _checkpoint(function, args, kwargs, offload, kept, settings, respect_saved_tensors_hooks)


checkpoint.__module__ = "lowtide"


def _kept_operators(keep: str | Sequence[str]) -> KeptOperators:
    words = read_kept(keep) if isinstance(keep, str) else tuple(keep)
    check_kept(words)
    return KeptOperators(words)


def _listed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    positional = [f"{len(args)} positional argument{'s' if len(args) > 1 else ''}"] if args else []
    return ", ".join([*positional, *kwargs])


def _check_keywords(kwargs: dict[str, Any], respect_saved_tensors_hooks: bool | None) -> None:
    """Refuse by name a keyword that torch's checkpoint would take for itself and this engine does not know."""
    if unknown := sorted(CHECKPOINT_KEYWORDS & kwargs.keys()):
        raise InvalidValueError(
            f"{', '.join(unknown)}: this is a setting of torch {torch.__version__}'s checkpoint that this version of "
            "Lowtide does not know. Leave it out, or use a newer Lowtide"
        )
    if respect_saved_tensors_hooks and "respect_saved_tensors_hooks" not in CHECKPOINT_KEYWORDS:
        raise InvalidValueError(
            f"respect_saved_tensors_hooks=True needs torch 2.14 or newer, and {torch.__version__} is installed, where "
            "saved-tensor hooks cannot see what a selective policy keeps. Leave it out, or upgrade torch"
        )


def _wrap(
    offload: Literal["host"] | Store | Schedule | None,
    kept: KeptOperators | None,
    settings: CheckpointSettings,
    respect_saved_tensors_hooks: bool | None,
    function: Callable[..., T],
) -> Callable[..., T]:
    """Return a function that checkpoints `function` with these settings whenever it is called."""

    @functools.wraps(function, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> T:
        return _checkpoint(function, args, kwargs, offload, kept, settings, respect_saved_tensors_hooks)

    return checkpointed


@graph_break("lowtide.checkpoint is no part of a graph: compile without fullgraph=True, or compile its function")
def _checkpoint(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], *settings: Any) -> T:
    compiler = send_compiler_away()
    try:
        inside: Callable[..., T] = function if compiler is None else CompiledCall(function, compiler)
        return _run_once(inside, args, kwargs, *settings)
    finally:
        swap_compiler(compiler)


def _run_once(
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offload: Literal["host"] | Store | Schedule | None,
    kept: KeptOperators | None,
    settings: CheckpointSettings,
    respect_saved_tensors_hooks: bool | None,
) -> T:
    schedule = None if offload is None else as_schedule(offload)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    given = uncompiled(function)
    is_module = isinstance(given, torch.nn.Module)  # which would look for a part of that name
    named = type(given) if is_module or not hasattr(given, "__qualname__") else given
    ledger = RegionLedger(named.__qualname__)
    if settings.context_fn is not noop_context_fn:
        contexts = with_offload(settings.context_fn, lambda: schedule or Schedule(HostStore()), ledger)
        settings = settings._replace(context_fn=contexts)
    return run_region(
        function,
        args,
        kwargs,
        ledger,
        schedule,
        keeping=None if kept is None else keeping_of(function, kept),
        settings=settings,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )


_DEFAULTS = CheckpointSettings()


def run_region(
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ledger: RegionLedger,
    schedule: Schedule | None,
    *,
    skip: Callable[[torch.Tensor], bool] | None = None,
    module: torch.nn.Module | None = None,
    habits: Habits | None = None,
    keeping: Keeping | None = None,
    settings: CheckpointSettings = _DEFAULTS,
    respect_saved_tensors_hooks: bool | None = None,
) -> T:
    """Run one checkpointed call and count it in `ledger`. Its inputs go to the schedule's store, if there is one.

    `skip` names tensors that stay on the device. `module` is the one whose forward `function` is, where the function
    does not tell, and `habits` is what earlier calls have shown about it. Call it where the compiler does not look.
    """
    refuse_without_hooks(ledger.name)
    if schedule is not None:
        refuse_to_move(ledger.name)
    if isinstance(function, functools.partial):
        function, args, kwargs = _unbind(function, args, kwargs)
    state = state_of(function, module, args, kwargs, ledger.name, habits)
    tensors, tree = flatten_call(args, kwargs)
    if tree.may_hide_tensors or not tensors:
        ledger.hidden += 1
    tensors = tree.take_copies(tensors, () if state is None else state.buffers())
    replay = _Replay(function, args, kwargs, tree, state, ledger)
    del args, kwargs
    ledger.forwards += 1
    hooks_around = hooks_module()
    is_nested = hooks_around == CHECKPOINT_HOOKS
    ledger.nested += is_nested
    if respect_saved_tensors_hooks is None and (schedule is not None or hooks_around == _OFFLOAD_HOOKS):
        respect_saved_tensors_hooks = False  # the hooks around the call are ours: torch need not warn
    if keeping is not None and not is_nested:
        replay.kept = keeping.begin(module, ledger)
    if schedule is None or is_nested:
        return run_checkpoint(replay, tensors, settings, respect_saved_tensors_hooks)  # type: ignore[no-any-return]
    call = schedule.begin(ledger, skip)
    if settings.context_fn is noop_context_fn:
        replay.on_entry = call.on_packed
    else:
        settings = settings._replace(context_fn=entered_after(call.on_packed, settings.context_fn))
    if replay.kept is not None:
        replay.kept.offload_with(call)
    try:
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            result: T = run_checkpoint(replay, tensors, settings, respect_saved_tensors_hooks)
    except BaseException:
        schedule.forget(call)
        raise
    call.on_submitted()
    return result


_OFFLOAD_HOOKS = "lowtide.checkpointing.offload"
"""The module of the saved-tensor hooks of `lowtide.offload`."""


def _unbind(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    while isinstance(function, functools.partial):
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    return function, args, kwargs


class _Replay:
    """The function that torch's checkpoint runs: first on the arguments as they were passed, later on restored tensors.

    After the first run it holds the tree of the arguments, but none of their tensors.
    """

    __slots__ = (
        *("_attention", "_first", "_function", "_kernels", "_ledger", "_state", "_transforms", "_tree"),
        *("is_compared", "kept", "on_entry", "region", "versions"),
    )

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tree: TensorTree,
        state: ForwardState | None,
        ledger: RegionLedger,
    ) -> None:
        self._function = function
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._transforms = transforms_around()
        self._attention = F.scaled_dot_product_attention
        self._kernels = attention_choice()
        self._tree = tree
        self._state = state
        self._ledger = ledger
        self.region = ledger.name
        self.versions: dict[int, int] = {}
        self.is_compared = False
        self.kept: KeptCall | None = None
        self.on_entry: Callable[[], None] | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        state, kept = self._state, self.kept
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            if self.on_entry is not None:
                on_entry, self.on_entry = self.on_entry, None
                on_entry()
            if state is not None:
                state.note()
            is_checked = not self.is_compared and check_handed_out(self.region, self.versions)
            try:
                result = self._function(*args, **kwargs) if kept is None else kept.run(self._function, args, kwargs)
            finally:
                if is_checked:
                    pop_hooks()
            if state is not None:
                state.settle()
            return result
        if self._transforms:
            refuse_to_run_again(self.region, self._transforms)
        refuse_other_attention(self.region, self._attention)
        args, kwargs = self._tree.unflatten(tensors, again=True)
        self._ledger.recomputes += 1
        try:
            if self._kernels == attention_choice():
                return self._find_state(tensors, args, kwargs)
            with attention_chosen(self._kernels):
                return self._find_state(tensors, args, kwargs)
        except RuntimeError as error:
            raise recomputation_stop(error) from error

    def _find_state(self, inputs: tuple[torch.Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        if state is None or state.is_as_noted():
            return self._run_again(inputs, args, kwargs)
        with state.restored(sees_saved=checkpoint_hooks() is not None) as refuse_saved:
            return self._run_again(inputs, args, kwargs, refuse_saved)

    def _run_again(
        self,
        inputs: tuple[torch.Tensor, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refuse_saved: RefuseSaved | None = None,
    ) -> Any:
        if self._ledger.recomputes == 1:
            refuse_saved = saved = SavedBytes(self._ledger, refuse_saved, inputs)
            if self.kept is not None:
                self.kept.outputs.on_recall = saved.leave_out
        is_noted = note_saved(self.versions, refuse_saved)
        try:
            if self.kept is None:
                return self._function(*args, **kwargs)
            return self.kept.run_again(self._function, args, kwargs)
        finally:
            if is_noted:
                pop_hooks()
