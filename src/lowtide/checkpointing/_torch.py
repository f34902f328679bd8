"""The door to the private names of torch's checkpoint: the one place beside `lowtide._torch` that may use such names.

Entries are written as there: each says what it is for, which torch has it and what public thing would replace it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from lowtide._torch import pytree

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_generator: Callable[..., Any] = torch_checkpoint._checkpoint_without_reentrant_generator
_GENERATOR_PARAMETERS = inspect.signature(_generator).parameters
_TAKES_TUPLES = _GENERATOR_PARAMETERS["args"].kind is not inspect.Parameter.VAR_POSITIONAL
"""Whether the function's arguments are handed over as `args, kwargs` (torch's main branch) or behind the settings."""

CHECKPOINT_KEYWORDS = frozenset({"use_reentrant"}) | frozenset(
    name
    for name in (*_GENERATOR_PARAMETERS, *inspect.signature(torch_checkpoint.checkpoint).parameters)
    if name not in ("fn", "function", "args", "kwargs")
)
"""The keywords that this torch's `checkpoint` takes for itself, read from its own signatures.

Whatever is not among them belongs to the function that is checkpointed. 2.14 added `respect_saved_tensors_hooks`.
"""


def non_reentrant_checkpoint(
    function: Callable[..., T],
    *args: Any,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
) -> T:
    """Run torch's non-reentrant checkpoint itself: its public name is what frameworks replace, and so do we.

    `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, 2.10; `respect_saved_tensors_hooks` since 2.14;
    `fn, args, kwargs, *, ...` on torch's main branch. Public replacement: `torch.utils.checkpoint.checkpoint`, were it
    not replaced.
    """
    options: dict[str, Any] = {
        "preserve_rng_state": preserve_rng_state,
        "context_fn": context_fn,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
    }
    if "respect_saved_tensors_hooks" in CHECKPOINT_KEYWORDS:
        options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
    if _TAKES_TUPLES:
        steps = _generator(function, args, {}, **options)
    else:
        hooks = {name: options.pop(name) for name in ("respect_saved_tensors_hooks",) if name in options}
        steps = _generator(function, *options.values(), *args, **hooks)
    next(steps)
    try:
        result = function(*args)
    except BaseException as error:
        steps.throw(error)
        raise
    next(steps, None)
    return result


def recomputation_stop(error: RuntimeError) -> BaseException:
    """Return what torch's checkpoint waits for if `error` stands for it; else `error` itself.

    Torch ends a recomputation early by an exception without words, raised as the last tensor is saved. If that happens
    inside a `torch.jit.script` function (ZoeDepth has one), the interpreter turns it into a RuntimeError without words.
    Whether everything was recomputed by then, torch counts afterwards.
    `torch.utils.checkpoint._StopRecomputationError`, 2.10. Public replacement: none.
    """
    text = str(error)
    is_wordless = "TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:")
    return torch_checkpoint._StopRecomputationError() if is_wordless else error


def hooks_module() -> str | None:
    """Return the name of the module whose saved-tensor hooks are the innermost in force, if any are.

    `torch._C._autograd._top_saved_tensors_default_hooks`, 2.10. Public replacement: none.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else getattr(hooks[0], "__module__", None)


def is_inside_checkpoint() -> bool:
    """Return whether a checkpoint around this place decides what is saved; then its hooks must see the inputs.

    Told by `hooks_module`, 2.10. Public replacement: none.
    """
    return hooks_module() == "torch.utils.checkpoint"


OFFLOAD_POLICIES = tuple(
    getattr(CheckpointPolicy, name)
    for name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
    if hasattr(CheckpointPolicy, name)
)
"""What a selective policy answers for outputs that should wait on the host. Public since 2.11; none in 2.10."""


class CachingMode(torch_checkpoint._CachingTorchDispatchMode):
    """Torch's cache of the outputs that a selective policy keeps, open to replacing an entry.

    Torch's eager mode takes offload for recompute: a subclass may answer "keep" and put the kept output elsewhere.
    `torch.utils.checkpoint._CachingTorchDispatchMode` and `_VersionWrapper`, 2.10; entries are counted by key since
    2.13, and appended to a list before. Public replacement: none.
    """

    def __init__(self, cache: Any, decide: Callable[..., Any]) -> None:
        graph_id = {"ac_graph_id": cache.ac_graph_id} if hasattr(cache, "ac_graph_id") else {}  # since 2.12
        super().__init__(decide, cache.storage, **graph_id)  # type: ignore[no-untyped-call]

    def replace_newest(self, func: Any, args: Any, replace: Callable[[torch.Tensor], Any]) -> None:
        """Put `replace(tensor)` in the place of every tensor of the entry that `func` was given last."""
        if hasattr(torch_checkpoint, "_sac_storage_key"):
            key = torch_checkpoint._sac_storage_key(func, args)  # type: ignore[no-untyped-call]
            entries, newest = self.storage[key], self.func_counter[key] - 1
        else:
            entries = self.storage[func]
            newest = len(entries) - 1

        def replaced(kept: Any) -> Any:
            if not isinstance(kept, torch_checkpoint._VersionWrapper) or not isinstance(kept.val, torch.Tensor):
                return kept
            if getattr(kept, "unpack_hook", None) is not None:  # since 2.14: hooks of the user have packed it
                return kept
            return replace(kept.val)

        entries[newest] = pytree.tree_map(replaced, entries[newest])


def is_selective_cache(context: Any) -> bool:
    """Return whether a forward context of `context_fn` is torch's cache of kept outputs.

    `torch.utils.checkpoint._CachingTorchDispatchMode`, 2.10. Public replacement: none.
    """
    return isinstance(context, torch_checkpoint._CachingTorchDispatchMode)


def rename_offload_policies(recompute: Any) -> None:
    """Let the recompute half of a selective context find what its cache kept under an offload policy.

    Before 2.13 it asks the policy again, and takes only what the policy says to save; later ones look in the cache.
    `torch.utils.checkpoint._CachedTorchDispatchMode.policy_fn`, 2.10 to 2.12.
    """
    policy = getattr(recompute, "policy_fn", None)
    if policy is not None:
        recompute.policy_fn = _SaveInsteadOfOffload(policy)


class _SaveInsteadOfOffload:
    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        policy = self._policy(*args, **kwargs)
        return CheckpointPolicy.MUST_SAVE if policy in OFFLOAD_POLICIES else policy
