"""The door to torch's private names: every one that Lowtide uses stands here, behind a verb.

Torch has no public way to ask which backward runs, what version a tensor has, or which storage lies behind it, and an
engine that works on saved tensors must ask. A new torch release is therefore read against this file, and against
`checkpointing/_torch.py` with the names of torch's checkpoint. ruff bans these names elsewhere, a test looks for the
rest, and the documentation lists both pages as they stand.

Each entry says what it is for, which torch has it ("2.10" means 2.10 or earlier) and
what public thing would replace it. The emulated device (`simdevice`) registers itself with torch by names that are not
listed here.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.autograd import _get_sequence_nr, forward_ad  # type: ignore[attr-defined]
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch.autograd.graph import Node

# What is passed on as it is; everything below that has no leading underscore is for use, too.
__all__ = ["ConvNd", "DropoutNd", "NormBase", "StorageWeakRef", "TorchDispatchMode"]
__all__ += ["is_traceable_wrapper_subclass", "no_dispatch_modes", "pytree"]

C = TypeVar("C", bound="Callable[..., Any]")


# --- The backward that runs ---------------------------------------------------------------------------------------


def graph_task_id() -> int:
    """Return the number of the backward that this thread works for; -1 outside of any.

    Tells a new backward from the one before it, so that what a backward needs once is done once.
    `torch._C._current_graph_task_id`, 2.10. Public replacement: none.
    """
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has ended. Only allowed inside a backward.

    The guard checks its counts then, and tiles let go of their inputs.
    `torch.autograd.Variable._execution_engine.queue_callback`, 2.10. Public replacement: none; DDP and FSDP2 use it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph (`retain_graph=True`), so that nothing may be overwritten.

    `torch._C._autograd._get_current_graph_task_keep_graph`, 2.10. Public replacement: none.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def current_node() -> Node | None:
    """Return the autograd node that runs on this thread, if one does.

    `torch._C._current_autograd_node`, 2.10. Public replacement: none.
    """
    node: Node | None = torch._C._current_autograd_node()
    return node


def next_sequence_number() -> int:
    """Return the number that the next autograd node of this thread will get; nodes made later have higher ones.

    `torch.autograd._get_sequence_nr`, 2.10. Public replacement: none.
    """
    return int(_get_sequence_nr())


def sequence_number(node: Node) -> int:
    """Return the number of an autograd node: which nodes a region made is told by it.

    `Node._sequence_nr`, 2.10. Public replacement: none.
    """
    return int(node._sequence_nr())


@functools.lru_cache(maxsize=1024)
def saved_fields(kind: type[Node]) -> tuple[str, ...]:
    """Return the names of the attributes in which a kind of node keeps its saved tensors.

    `Node._raw_saved_*`, 2.10. Public replacement: none for all nodes; `saved_tensors` exists on custom functions.
    """
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


ENGINE_FUNCTION = "_engine_run_backward"
"""The name of the Python frame below which the autograd engine runs. 2.10. Public replacement: none."""


# --- Tensors, versions and storages ---------------------------------------------------------------------------------

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Return how often a tensor was changed in place; views of one tensor share the count.

What autograd checks for saved tensors must be checked by whoever takes them out of its hands.
`Tensor._version`, 2.10. Public replacement: none.
"""

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Return what identifies a storage while it lives; afterwards another may have the same key.

Tensors share memory exactly if their storages have one key; a pointer would not do, for empty and meta storages share
theirs. `UntypedStorage._cdata`, 2.10. Public replacement: none.
"""


def tensor_from(reference: StorageWeakRef, like: tuple[torch.dtype, torch.device, int, int]) -> torch.Tensor | None:
    """Return a flat tensor (type, device, offset, length) over a storage, if anybody still uses that storage.

    `UntypedStorage._new_with_weak_ptr`, 2.10. Public replacement: none; `torch.multiprocessing` uses it.
    """
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    if storage is None:
        return None
    dtype, device, offset, length = like
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, (length,), (1,))


def keep_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Let changes of `tensor` inside go uncounted: a probe that gives up its memory has not been modified.

    `torch.autograd.grad_mode._unsafe_preserve_version_counter`, 2.10. Public replacement: none.
    """
    return _unsafe_preserve_version_counter(tensor)


def aliases_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of a parameter, whose memory stays whatever happens to the view.

    `Tensor._base`, 2.10. Public replacement: none.
    """
    return isinstance(tensor._base, nn.Parameter)


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made as a view of another one.

    `Tensor._is_view`, 2.10. Public replacement: none.
    """
    return tensor._is_view()


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for zeros without memory, as tangents of forward-mode AD do.

    `torch._is_zerotensor`, 2.10. Public replacement: none.
    """
    return torch._is_zerotensor(tensor)


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of `torch.func`'s wrappers, which have no storage to look at.

    `torch._C._functorch.is_functorch_wrapped_tensor`, 2.10. Public replacement: none.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


# `StorageWeakRef` tells whether a storage is still in use without keeping it alive. `torch.multiprocessing.reductions`
# has no leading underscore and no documentation either; 2.10. Public replacement: none.


# --- Transforms of functions ----------------------------------------------------------------------------------------


def transforms_around() -> int:
    """Return how many transforms of `torch.func` (grad, vmap, jvp, ...) are around this place.

    `torch._C._functorch.maybe_current_level`, 2.10. Public replacement: none.
    """
    return torch._C._functorch.maybe_current_level() or 0


def is_in_forward_mode() -> bool:
    """Return whether forward-mode AD is on, by `torch.func.jvp` or by `torch.autograd.forward_ad`.

    `torch.autograd.forward_ad._current_level`, 2.10. Public replacement: none.
    """
    return forward_ad._current_level >= 0


def are_hooks_allowed() -> bool:
    """Return whether saved-tensor hooks may be used here: `torch.func.grad` forbids them, and anybody can.

    `torch._C._autograd._saved_tensors_hooks_is_enabled`, 2.10. Public replacement: none.
    """
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


# --- Operators and dispatch -----------------------------------------------------------------------------------------

# `TorchDispatchMode` sees every operator (ledger, trace, audit); `no_dispatch_modes` suspends such modes for numbers
# that are not the program's own; `is_traceable_wrapper_subclass` tells tensors that hold others. They live in
# `torch.utils._python_dispatch`, 2.10; the first is documented for extension authors. Public replacement: none.
#
# `pytree` takes nested values apart: `torch.utils._pytree`, 2.10. Public replacement: none in torch (`optree` is a
# package of its own).


def operator_of(overload: Any) -> Any:
    """Return the operator that an overload belongs to: `aten.copy_` for `aten.copy_.default`.

    `OpOverload._overloadpacket`, 2.10. Public replacement: none; `OpOverload.overloadpacket` does not exist.
    """
    return overload._overloadpacket


def schema_of(overload: Any) -> Any:
    """Return the schema of an operator's overload: names, defaults, and what its results alias.

    `OpOverload._schema`, 2.10. Public replacement: none.
    """
    return overload._schema


# --- Modules --------------------------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary in which a module keeps its own parameters, under the names it gave them.

    `named_parameters` leaves out a second name of a tied weight, and a weight can be replaced only where it is held.
    `Module._parameters`, 2.10. Public replacement: none.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary in which a module keeps its own buffers.

    A forward may replace a buffer; putting the old one back must not go through `__setattr__`.
    `Module._buffers`, 2.10. Public replacement: none.
    """
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary in which a module keeps its children, under the names it gave them.

    `Module._modules`, 2.10. Public replacement: `named_children`, except that it leaves out second names.
    """
    return module._modules


def hooks_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the dictionaries in which a module keeps its hooks, by kind.

    `Module._forward_hooks` and its likes, 2.10. Public replacement: none.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {kind: getattr(module, kind) for kind in kinds}


NON_PERSISTENT = "_non_persistent_buffers_set"
"""The attribute that names a module's buffers that are not in its state dict. 2.10. Public replacement: none."""

COMPILED_CALL = "_compiled_call_impl"
"""The attribute that `module.compile()` sets. 2.10. Public replacement: none."""

CONTENT = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold its content; everything else is an attribute that its class gave it. 2.10."""

# `NormBase`, `ConvNd` and `DropoutNd` are the classes that torch's batch norms, convolutions and dropouts share. 2.10.
# Public replacement: lists of their subclasses, which would go stale.

_REPLICATE = "_replicate_for_data_parallel"


def make_data_parallel_refuse(module: nn.Module, refuse: Callable[[], Any] | None) -> None:
    """Let `nn.DataParallel` call `refuse` instead of copying this module; None undoes it.

    `Module._replicate_for_data_parallel`, 2.10. Public replacement: none.
    """
    if refuse is None:
        vars(module).pop(_REPLICATE, None)
    else:
        vars(module)[_REPLICATE] = refuse


def fsdp_param_groups(modules: Iterable[Any]) -> list[Any]:
    """Return FSDP2's groups of parameters behind `FSDPModule`s; each says whether and when it reshards.

    What `set_reshard_after_forward` and `set_reshard_after_backward` set cannot be read back, and must be put back.
    `FSDPModule._get_fsdp_state` since 2.10; `FSDPState._fsdp_param_groups` since 2.12, before it `_fsdp_param_group`.
    Public replacement: none.
    """
    states = [module._get_fsdp_state() for module in modules]
    return [group for state in states for group in _groups_of(state) if group is not None]


def _groups_of(state: Any) -> list[Any]:
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]


# --- Compilation ----------------------------------------------------------------------------------------------------


def disable_dynamo(function: C) -> C:
    """Make `function` a break of the graph in compiled code: what is inside runs eagerly unless compiled itself.

    `torch._disable_dynamo`, 2.10. Public replacement: `torch.compiler.disable`, which imports the compiler (a second
    or two) as the decorator is applied.
    """
    return torch._disable_dynamo(function)  # type: ignore[attr-defined, return-value]


def runs_compiled_backward() -> bool:
    """Return whether compiled autograd runs a backward. The engine runs none then, and takes no callbacks.

    `torch._dynamo.compiled_autograd.in_compiled_autograd_region`, 2.10. Public replacement: none.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def import_dynamo() -> None:
    """Import torch's compiler now: else the first operation under a dispatch mode does it, for a second or two.

    `torch._dynamo`, 2.10. Public replacement: none.
    """
    importlib.import_module("torch._dynamo")
