"""The one door to torch's private names: every one that Lowtide uses stands here, behind a verb.

Torch has no public way to ask which backward runs, what version a tensor has, or which storage lies behind it, and an
engine that works on saved tensors must ask. A new torch release is therefore read against this file alone. ruff bans
these names elsewhere, a test looks for the rest, and the documentation lists this page as it stands.

Each entry says what it is for, which torch has it ("2.10" means 2.10 or earlier) and
what public thing would replace it. The emulated device (`simdevice`) registers itself with torch by names that are not
listed here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd import _get_sequence_nr, forward_ad  # type: ignore[attr-defined]
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.autograd.graph import Node

# What is passed on as it is; everything below that has no leading underscore is for use, too.
__all__ = ["ConvNd", "DropoutNd", "NormBase", "StorageWeakRef", "TorchDispatchMode"]
__all__ += ["is_traceable_wrapper_subclass", "no_dispatch_modes", "pytree"]

T = TypeVar("T")
C = TypeVar("C", bound="Callable[..., Any]")


# --- The backward that runs ---------------------------------------------------------------------------------------


NO_BACKWARD = -1
"""What `graph_task_id` returns outside of any backward."""


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


def version_if_any(tensor: torch.Tensor) -> int:
    """Return a tensor's version; 0 for inference tensors, which have none.

    `Tensor._version`, 2.10. Public replacement: none.
    """
    try:
        return version_of(tensor)
    except RuntimeError:
        return 0


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


def references_to(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return how often a tensor, its storage and its Python object are referred to, this call's references included.

    `Tensor._use_count` and `torch._C._storage_Use_Count`, 2.10. Public replacement: none.
    """
    storage = torch._C._storage_Use_Count(storage_key(tensor.untyped_storage()))
    return tensor._use_count(), storage, sys.getrefcount(tensor)  # type: ignore[attr-defined]


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


@contextlib.contextmanager
def differentiable_kernel(operator: str, kernel: Callable[..., Any], device: str) -> Iterator[None]:
    """Let an operator that torch takes apart into others be `kernel` on one kind of device inside.

    `torch.library.Library` is public, and torch has no public way to take back what was registered with it.
    `torch.library._scoped_library`, 2.10. Public replacement: none.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(operator, kernel, f"Autograd{device.capitalize()}")
        yield


def schema_of(overload: Any) -> Any:
    """Return the schema of an operator's overload: names, defaults, and what its results alias.

    None for a higher-order operator such as `flex_attention`, which has none.
    `OpOverload._schema`, 2.10. Public replacement: none.
    """
    return getattr(overload, "_schema", None)


def group_of(overload: Any, args: tuple[Any, ...]) -> Any:
    """Return the process group of a call if it is a collective; None for any other operator.

    Arguments of the names `process_group` (boxed) and `group_name`; `distributed_c10d._resolve_process_group`, 2.10.
    Public replacement: none.
    """
    if overload.namespace not in ("c10d", "_c10d_functional"):
        return None
    given = {argument.name: value for argument, value in zip(schema_of(overload).arguments, args, strict=False)}
    if isinstance(given.get("group_name"), str):
        from torch.distributed import distributed_c10d

        return distributed_c10d._resolve_process_group(given["group_name"])  # type: ignore[attr-defined]
    return torch.distributed.ProcessGroup.unbox(given["process_group"]) if "process_group" in given else None


def collectives_so_far() -> dict[Any, int]:
    """Return how many collectives each process group of this rank has begun, in the order in which groups were made.

    An operator of somebody's own (`torch.library.custom_op`) hides from dispatch modes what it does. Groups whose
    backend does not count are left out. `torch.distributed.distributed_c10d._world.pg_map`,
    `ProcessGroup._get_sequence_number_for_group`, 2.10. Public replacement: none.
    """
    found: dict[Any, int] = {}
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return found
    for group in torch.distributed.distributed_c10d._world.pg_map:
        with contextlib.suppress(RuntimeError):
            found[group] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return found


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


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of a module's hooks before and after forward, and those that say which take keywords.

    `Module._forward_pre_hooks`, `_forward_hooks` and their `_with_kwargs`, 2.10. Public replacement: none.
    """
    kwargs = module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs
    return module._forward_pre_hooks, module._forward_hooks, *kwargs


def parts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all their parts. Much faster than `modules()`, which looks at names; some may come twice.

    `Module._modules`, 2.10. Public replacement: none.
    """
    parts = [*modules]
    for part in parts:  # which grows meanwhile
        if children := part._modules:
            parts += [child for child in children.values() if child is not None]
    return parts


def with_parameters(parts: list[nn.Module]) -> list[dict[str, nn.Parameter | None]]:
    """Return the dictionaries of parameters of those modules that have their own.

    Here and in the next two, no line of Python runs for each module: a region asks at each of its calls, when none of
    this is in the processor's caches. `Module._parameters`, 2.10. Public replacement: none.
    """
    return [*filter(None, map(_parameters, parts))]


def have_buffers(modules: list[nn.Module]) -> bool:
    """Return whether one of the modules has a buffer of its own.

    `Module._buffers`, 2.10. Public replacement: none.
    """
    return any(map(_buffers, modules))


def have_forward_hooks(modules: list[nn.Module]) -> bool:
    """Return whether one of the modules, or all modules have a hook before or after their forward.

    `Module._forward_pre_hooks` and `_forward_hooks`, 2.10. Public replacement: none.
    """
    if any(map(_forward_hooks, modules)) or any(map(_forward_pre_hooks, modules)):
        return True
    return bool(_GLOBAL_HOOKS[0] or _GLOBAL_HOOKS[1])


def global_forward_hooks() -> tuple[dict[int, Any], ...]:
    """Return the dictionaries of hooks that act on all modules, before and after forward.

    `torch.nn.modules.module._global_forward_hooks` and its likes, 2.10. Public replacement: none.
    """
    return _GLOBAL_HOOKS


_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    getattr(torch.nn.modules.module, name)
    for name in (
        *("_global_forward_pre_hooks", "_global_forward_hooks"),
        *("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"),
    )
)


_parameters = operator.attrgetter("_parameters")
_buffers = operator.attrgetter("_buffers")
_forward_hooks = operator.attrgetter("_forward_hooks")
_forward_pre_hooks = operator.attrgetter("_forward_pre_hooks")


NON_PERSISTENT = "_non_persistent_buffers_set"
"""The attribute that names a module's buffers that are not in its state dict. 2.10. Public replacement: none."""

COMPILED_CALL = "_compiled_call_impl"
"""The attribute that `module.compile()` sets. 2.10. Public replacement: none."""


@contextlib.contextmanager
def without_parametrize_cache() -> Iterator[None]:
    """Compute parametrized weights anew inside, whatever `parametrize.cached()` around it keeps; that stays as it is.

    The cache knows modules by addresses, and a cached weight belongs to the graph of whatever asked for it first.
    `torch.nn.utils.parametrize._cache_enabled`, 2.10. Public replacement: none.
    """
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


CONTENT = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold its content; everything else is an attribute that its class gave it. 2.10."""

# `NormBase`, `ConvNd` and `DropoutNd` are the classes that torch's batch norms, convolutions and dropouts share. 2.10.
# Public replacement: lists of their subclasses, which would go stale.

REPLICATE = "_replicate_for_data_parallel"
"""The method of a module that `make_data_parallel_refuse` replaces."""


def make_data_parallel_refuse(module: nn.Module, refuse: Callable[[], Any] | None) -> None:
    """Let `nn.DataParallel` call `refuse` instead of copying this module; None undoes it.

    `Module._replicate_for_data_parallel`, 2.10. Public replacement: none.
    """
    if refuse is None:
        vars(module).pop(REPLICATE, None)
    else:
        vars(module)[REPLICATE] = refuse


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


FSDP1_MARK = "_fsdp_flattened"
"""The attribute with which FSDP1 marks parameters that it shards and gathers. 2.10. Public replacement: none."""


# --- Attention ------------------------------------------------------------------------------------------------------


def is_attention_replaced() -> bool:
    """Return whether `torch.nn.functional.scaled_dot_product_attention` is somebody's, as in context parallelism.

    A simulation replaces it with ours, which does not count.
    `torch._C._nn.scaled_dot_product_attention`, 2.10. Public replacement: none.
    """
    function = nn.functional.scaled_dot_product_attention
    is_ours = (getattr(function, "__module__", None) or "").startswith("lowtide.")
    return function is not torch._C._nn.scaled_dot_product_attention and not is_ours


_KERNEL_SWITCHES = ("cudnn", "flash", "mem_efficient", "math", "overrideable")
_read_switches: list[Callable[[], Any]] = [getattr(torch._C, f"_get_{name}_sdp_enabled") for name in _KERNEL_SWITCHES]
_set_switches: list[Callable[[bool], None]] = [getattr(torch._C, f"_set_sdp_use_{name}") for name in _KERNEL_SWITCHES]


def attention_choice() -> list[Any]:
    """Return which kernels attention may take (`torch.nn.attention.sdpa_kernel`), and in which order it tries them.

    Asked at each call of a region, so by the functions themselves. `torch._C._get_flash_sdp_enabled` and its likes,
    `torch._C._get_sdp_priority_order`, 2.10. Public replacement: `torch.backends.cuda.flash_sdp_enabled` and its likes,
    which know neither the overrideable kernel nor the order.
    """
    return [*[read() for read in _read_switches], torch._C._get_sdp_priority_order()]


@contextlib.contextmanager
def attention_chosen(choice: list[Any]) -> Iterator[None]:
    """Let attention take the kernels of an `attention_choice` inside.

    `torch._C._set_sdp_use_flash` and its likes, `torch._C._set_sdp_priority_order`, 2.10. Public replacement:
    `torch.nn.attention.sdpa_kernel`, except that it cannot be given an order that was read.
    """
    now = attention_choice()
    try:
        _choose_attention(choice)
        yield
    finally:
        _choose_attention(now)


def _choose_attention(choice: list[Any]) -> None:
    *switches, order = choice
    for set_switch, is_on in zip(_set_switches, switches, strict=True):
        set_switch(is_on)
    torch._C._set_sdp_priority_order(order)


# --- Compilation ----------------------------------------------------------------------------------------------------


swap_compiler = torch._C._dynamo.eval_frame.set_eval_frame
"""Let another compiler, or none, look into the functions that this thread calls, and return the one that did.

`torch._C._dynamo.eval_frame.set_eval_frame`, 2.10. Public replacement: none; `torch.compiler.disable` sends the
compiler away from all that is inside, and nothing calls it back."""


def _no_frame_for_compilers(function: C) -> C:
    """Have compilers leave a function's own frame alone, which runs before they are sent away."""
    frames = torch._C._dynamo.eval_frame
    plainly = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, plainly)
    return function


@_no_frame_for_compilers
def send_compiler_away() -> Any:
    """Let no compiler look into the functions that this thread calls, and return the one that did (`swap_compiler`).

    From now on, torch looks among the graphs of a function for the oldest that fits a call. By default it begins with
    the one that ran last, so that a recompute, or a tile's second run, could get another graph than its forward did
    (one for any length instead of one for this length), which may save other tensors. It concerns the speed of that
    search alone, and is not put back: the backwards of graphs that exist need it.

    `torch._C._dynamo.eval_frame._set_lru_cache`, 2.10. Public replacement: none.
    """
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]
    return swap_compiler(None)


def graph_break(reason: str) -> Callable[[C], C]:
    """Make a function a break of the graph in compiled code. It must first send the compiler away.

    With `fullgraph=True`, torch's error gives the reason. `torch._C._dynamo.eval_frame.set_code_exec_strategy`, and the
    attributes by which `torch.compiler.disable` marks its functions, 2.10. Public replacement: that decorator, which
    imports the compiler (a second or two) as it is applied.
    """

    def mark(function: C) -> C:
        _no_frame_for_compilers(function)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return function

    return mark


def outside_graph(function: C) -> C:
    """Make a function a break of the graph in compiled code, with all that it calls.

    `torch._C._dynamo.eval_frame.set_eval_frame`, 2.10. Public replacement: `torch.compiler.disable`, which imports the
    compiler (a second or two) as the decorator is applied.
    """

    @functools.wraps(function)
    @graph_break("this is work of a Lowtide policy, and no part of a graph: compile without fullgraph=True")
    def outside(*args: Any, **kwargs: Any) -> Any:
        compiler = swap_compiler(None)
        try:
            return function(*args, **kwargs)
        finally:
            swap_compiler(compiler)

    return outside  # type: ignore[return-value]


class CompiledCall:
    """A function that a compiler looks into, as it would have without the break of the graph around it.

    `_torchdynamo_orig_callable` is the name by which torch, too, knows what a compiled function was made of, 2.10.
    Public replacement: none.
    """

    def __init__(self, function: Callable[..., Any], compiler: Any) -> None:
        self._torchdynamo_orig_callable = function
        self._compiler = compiler

    @graph_break("a function of compiled code is called from outside of it")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = _in_a_frame(self._torchdynamo_orig_callable)
        before = swap_compiler(self._compiler)
        try:
            return function(*args, **kwargs)
        finally:
            swap_compiler(before)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._torchdynamo_orig_callable)


def _in_a_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of torch's own modules in a function that a compiler looks into, as `torch.compile` does.

    Compilers leave frames of torch alone, unless they come from a frame that is none of torch's.
    `torch._dynamo.external_utils.wrap_inline`, 2.10. Public replacement: none.
    """
    if not (getattr(function, "__module__", None) or "").startswith("torch."):
        return function
    return importlib.import_module("torch._dynamo.external_utils").wrap_inline(function)  # type: ignore[no-any-return]


def compiled_like(compiled: Any, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Compile a function with the settings that another was compiled with; None if torch does not tell them.

    The variable `self` of functions that `torch.compile` returns, 2.10. Public replacement: none.
    """
    variables = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    if "self" not in variables:
        return None
    return compiled.__closure__[variables.index("self")].cell_contents(function)  # type: ignore[no-any-return]


def uncompiled(function: C) -> C:
    """Return the function that `torch.compile` made this one of, or the function itself.

    The attribute `_torchdynamo_orig_callable` of compiled functions, 2.10. Public replacement: none.
    """
    if isinstance(function, nn.Module):  # which would look for a part of that name
        return function.__dict__.get("_torchdynamo_orig_callable", function)  # type: ignore[no-any-return]
    return getattr(function, "_torchdynamo_orig_callable", function)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module runs compiled, by `module.compile()`, by `torch.compile(module)`, or by its forward.

    `Module._compiled_call_impl`, and `_torchdynamo_orig_callable` of compiled functions, 2.10.
    Public replacement: none.
    """
    held = module.__dict__
    return held.get(COMPILED_CALL) is not None or hasattr(held.get("forward"), "_torchdynamo_orig_callable")


def runs_compiled_backward() -> bool:
    """Return whether compiled autograd runs a backward. The engine runs none then, and takes no callbacks.

    `torch._dynamo.compiled_autograd.in_compiled_autograd_region`, 2.10. Public replacement: none.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def has_compiled_code() -> bool:
    """Return whether this process has compiled anything: compiled code calls operators that no mode sees.

    `torch._dynamo.convert_frame.FRAME_COUNTER`, 2.10. Public replacement: none.
    """
    module = sys.modules.get("torch._dynamo.convert_frame")
    return module is not None and module.FRAME_COUNTER > 0


def import_dynamo() -> None:
    """Import torch's compiler now: else the first operation under a dispatch mode does it, for a second or two.

    `torch._dynamo`, 2.10. Public replacement: none.
    """
    importlib.import_module("torch._dynamo")


# --- Checkpoint -----------------------------------------------------------------------------------------------------

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

_KNOWS_OTHERS_HOOKS = "respect_saved_tensors_hooks" in CHECKPOINT_KEYWORDS


class CheckpointSettings(NamedTuple):
    """The settings of torch's checkpoint, in the order in which its generator takes them.

    `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, 2.10. Public replacement: none.
    """

    preserve_rng_state: bool = True
    context_fn: Callable[[], Any] = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True


def non_reentrant_checkpoint(
    function: Callable[..., T],
    tensors: Sequence[torch.Tensor],
    settings: CheckpointSettings,
    respect_saved_tensors_hooks: bool | None = None,
) -> T:
    """Run torch's non-reentrant checkpoint itself: its public name is what frameworks replace, and so do we.

    `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, 2.10; `respect_saved_tensors_hooks` since 2.14;
    `fn, args, kwargs, *, ...` on torch's main branch. Public replacement: `torch.utils.checkpoint.checkpoint`, were it
    not replaced.
    """
    if _TAKES_TUPLES:
        hooks = {"respect_saved_tensors_hooks": respect_saved_tensors_hooks}
        steps = _generator(function, tuple(tensors), {}, **settings._asdict(), **hooks)
    elif _KNOWS_OTHERS_HOOKS:
        steps = _generator(function, *settings, *tensors, respect_saved_tensors_hooks=respect_saved_tensors_hooks)
    else:
        steps = _generator(function, *settings, *tensors)
    next(steps)
    try:
        result = function(*tensors)
    except BaseException as error:
        steps.throw(error)
        raise
    next(steps, None)
    return result


_PLAIN_FRAME = ("recompute_fn", "early_stop", "unpack_error_cb", "metadata_fn")
_FRAME = tuple(inspect.signature(getattr(torch_checkpoint, "_CheckpointFrame", object)).parameters)
_HAS_PLAIN_FRAMES = not _KNOWS_OTHERS_HOOKS and _FRAME == _PLAIN_FRAME
"""Whether this torch's frames are made as those of 2.10 to 2.13. Of others, only torch itself makes some."""


def new_frame(
    again: Callable[..., None], tensors: Sequence[torch.Tensor], settings: CheckpointSettings
) -> tuple[Any, torch.autograd.graph.saved_tensors_hooks] | None:
    """Return torch's frame of a checkpoint and its hooks for the forward; `again` is what it runs in backward.

    None if the call is not a plain one: its settings or the modes around it have torch do more than that.
    `torch.utils.checkpoint._CheckpointFrame`, `_checkpoint_hook`, `_allowed_determinism_checks_to_fns`,
    `_checkpoint_debug_enabled` and `_enable_checkpoint_early_stop`, `torch._C._len_torch_function_stack`,
    `torch.compiler._is_non_strict_tracing`, 2.10 to 2.13. Public replacement: none.
    """
    _, context_fn, determinism_check, debug, early_stop = settings
    debug_set, early_set = torch_checkpoint._checkpoint_debug_enabled, torch_checkpoint._enable_checkpoint_early_stop
    is_plain = _HAS_PLAIN_FRAMES and context_fn is noop_context_fn and not (debug if debug_set is None else debug_set)
    if not is_plain or torch._C._len_torch_function_stack() or _is_traced():
        return None
    describe = torch_checkpoint._allowed_determinism_checks_to_fns.get(determinism_check)
    if describe is None:
        return None
    early_stop = early_stop if early_set is None else early_set
    frame = torch_checkpoint._CheckpointFrame(again, early_stop, None, describe)
    frame.save_inputs(*tensors)  # type: ignore[no-untyped-call]
    return frame, torch_checkpoint._checkpoint_hook(frame)


_is_traced: Callable[[], bool] = getattr(torch.compiler, "_is_non_strict_tracing", lambda: False)


def has_started(kind: str) -> bool:
    """Return whether a kind of device has generators by now: those of an accelerator come with its first use.

    `torch.cuda._initialized` and its likes, 2.10. Public replacement: `torch.cuda.is_initialized`, not for all kinds.
    """
    return kind == "cpu" or getattr(torch.get_device_module(kind), "_initialized", False)


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


CHECKPOINT_HOOKS = "torch.utils.checkpoint"
"""What `hooks_module` returns inside a checkpoint."""


def checkpoint_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the innermost saved-tensor hooks if they are a checkpoint's, of its forward or of its recompute.

    `torch._C._autograd._top_saved_tensors_default_hooks`, 2.10. Public replacement: none.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_checkpoint = hooks is not None and getattr(hooks[0], "__module__", None) == CHECKPOINT_HOOKS
    return hooks if is_checkpoint else None


push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)
"""Put saved-tensor hooks in force, until `pop_hooks`.

`torch._C._autograd._push_saved_tensors_default_hooks`, 2.10. Public replacement: `saved_tensors_hooks`, which calls
this one, in six times the time; regions do it at each call and at each recompute."""

pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""End what `push_hooks` began. `torch._C._autograd._pop_saved_tensors_default_hooks`, 2.10."""


def like_hook(hook: C, original: Any) -> C:
    """Let a hook that calls torch's pass for it: a checkpoint is told by its hooks' names, not by us alone.

    `torch.utils.checkpoint._checkpoint_hook` and `_recomputation_hook`, 2.10. Public replacement: none.
    """
    hook.__module__, hook.__qualname__ = original.__module__, original.__qualname__
    return hook


def is_inside_checkpoint() -> bool:
    """Return whether a checkpoint around this place decides what is saved; then its hooks must see the inputs.

    Told by `hooks_module`, 2.10. Public replacement: none.
    """
    return hooks_module() == CHECKPOINT_HOOKS


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


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, with the same version counter and without a graph.

    In a dispatch mode, which is below autograd, the result of a plain `detach` has a counter of its own.
    `torch._C._SetExcludeDispatchKeyGuard`, 2.10. Public replacement: none.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def sleep_on_cuda(cycles: int) -> None:
    """Let the current CUDA stream wait for so many cycles of its clock.

    `torch.cuda._sleep`, 2.10. Public replacement: none.
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
