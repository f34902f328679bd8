"""Keeps the real values of a simulated step's small tensors.

Meta tensors have shapes and no values, and models do look at values: where the image tokens are, how long each image
is, whether a mask is full. So integer tensors, and small tensors of any kind, carry their real value on the CPU with
them, and every operation whose inputs all have known values is run on the values too. What is computed from weights or
activations has no value: reading it is an error that names the operation. One exception makes mixtures of experts work:
the choice among unknown scores (`topk`, `argmax`, `sort`) is taken to be balanced.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import no_dispatch_modes, operator_of, pytree, schema_of
from lowtide.errors import PlanError
from lowtide.recording import tensors_in
from lowtide.simulation.meta_tensors import is_meta, meta_like
from lowtide.targets.live_module import INTEGERS, MOST_INTEGERS, has_kept_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.simulation.meta_tensors import MetaKernels

aten = torch.ops.aten

_KINDS: dict[str, tuple[Any, ...]] = {
    "reads": (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal),
    "copies": (aten.copy_,),
    "moves": (aten._to_copy,),
    "shaped by values": (
        aten.nonzero,
        aten.masked_select,
        aten.unique_dim,
        aten._unique2,
        aten.unique_consecutive,
        aten.repeat_interleave,
        aten.bincount,
    ),
    "indexed": (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_),
    "unset": (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided),
    "ranking": (aten.topk, aten.sort, aten.argsort, aten.argmax, aten.argmin),
}


@functools.cache
def _kind(func: Any) -> str:
    """Return what is special about an operation, mostly nothing (`""`). Asked for each call, so it is remembered."""
    return next((kind for kind, packets in _KINDS.items() if operator_of(func) in packets), "")


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the real value of a tensor, if it is known."""
    if is_meta(tensor):
        value: torch.Tensor | None = tensor.__dict__.get("_lowtide_value")
        return value
    return tensor


def set_value(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """Let a meta tensor carry its value from now on; None forgets it."""
    tensor.__dict__["_lowtide_value"] = value


def run_operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor], kernels: MetaKernels
) -> Any:
    """Run an operation on meta tensors, and on their values where those are known. `inputs` are all its tensors."""
    kind = _kind(func)
    if kind == "reads" and any(map(is_meta, inputs)):
        return _read(func, args)
    if kind == "copies" and is_meta(args[1]) and not is_meta(args[0]):
        return _copy_to_host(args)
    if kind == "moves" and is_meta(args[0]) and _leaves_device(kwargs):
        return _move_to_host(args[0], kwargs)
    if kind == "shaped by values" and any(map(is_meta, inputs)):
        return _shaped_by_values(func, args, kwargs, inputs)
    if kind == "indexed":
        args = (args[0], list(_masks_to_positions(args[1])), *args[2:])
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}  # host memory here is never written to, so it takes no page
    out = kernels.run(func, args, kwargs)
    _update_values(func, args, kwargs, inputs, out)
    return out


def _leaves_device(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


def _copy_to_host(args: tuple[Any, ...]) -> torch.Tensor:
    target: torch.Tensor = args[0]
    value = value_of(args[1])
    if value is not None:
        with no_dispatch_modes():
            target.copy_(value)
    return target


def _move_to_host(tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    value = value_of(tensor)
    dtype = kwargs.get("dtype") or tensor.dtype
    with no_dispatch_modes():
        if value is not None:
            return value.to(dtype, copy=True)
        return torch.empty(tensor.shape, dtype=dtype)


def _update_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor], out: Any
) -> None:
    known = all(value_of(tensor) is not None for tensor in inputs)
    if schema_of(func).is_mutable:
        _update_in_place(func, args, kwargs, known=known)
        return
    results = [tensor for tensor in tensors_in((out,)) if is_meta(tensor)]
    if not results or _kind(func) == "unset":
        return
    if known:
        if all(has_kept_size(tensor) for tensor in results):
            with contextlib.suppress(NotImplementedError):  # the CPU has no such kernel: the value stays unknown
                _attach_values(out, _run_on_values(func, args, kwargs))
    elif _kind(func) == "ranking":
        _rank_evenly(results, args[0])


def _update_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, known: bool) -> None:
    """Change the values of what is written to, the first argument: a tensor, or a list of them."""
    targets = [tensor for tensor in tensors_in(args[:1]) if is_meta(tensor)]
    if not any(value_of(target) is not None for target in targets):
        return
    if known:
        _run_on_values(func, args, kwargs)
        return
    for target in targets:
        set_value(target, None)


def _read(func: Any, args: tuple[Any, ...]) -> Any:
    name = operator_of(func).__name__
    values = [_require_value(tensor, name) for tensor in args if isinstance(tensor, torch.Tensor)]
    with no_dispatch_modes():
        return torch.equal(*values) if name == "equal" else values[0].item()


def _shaped_by_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
    for tensor in inputs:
        _require_value(tensor, operator_of(func).__name__)
    real = _run_on_values(func, args, kwargs)
    meta = pytree.tree_map(lambda leaf: meta_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, real)
    _attach_values(meta, real)
    return meta


def _masks_to_positions(indices: Any) -> Iterator[Any]:
    """Replace masks in an index by the positions where they are true, which have a known shape."""
    for index in indices:
        if not is_meta(index) or index.dtype not in (torch.bool, torch.uint8):
            yield index
            continue
        with no_dispatch_modes():
            columns = [column.contiguous() for column in _require_value(index, "index").nonzero().unbind(1)]
        for column in columns:
            positions = meta_like(column)
            set_value(positions, column)
            yield positions


def _rank_evenly(results: list[torch.Tensor], scores: torch.Tensor) -> None:
    """Choose every class equally often, as a router that is trained to balance its experts does on average."""
    for tensor in results:
        if tensor.dtype in INTEGERS and tensor.numel() <= MOST_INTEGERS:
            classes = max(scores.shape[-1] if scores.dim() else 1, 1)
            with no_dispatch_modes():
                set_value(tensor, torch.arange(tensor.numel()).remainder(classes).reshape(tensor.shape))


def _require_value(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    value = value_of(tensor)
    if value is None:
        raise PlanError(
            f"the model reads a number that only exists at run time ({operation} on a {str(tensor.dtype)[6:]} tensor "
            f"of shape {tuple(tensor.shape)}), so its step cannot be simulated: plan the model without the part that "
            "reads it"
        )
    return value


def _run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map(_to_value, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    with no_dispatch_modes():
        return func(*args, **kwargs)


def _to_value(leaf: Any) -> Any:
    if is_meta(leaf):
        return value_of(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _attach_values(meta: Any, real: Any) -> None:
    for one, other in zip(pytree.tree_leaves(meta), pytree.tree_leaves(real), strict=True):
        if is_meta(one) and isinstance(other, torch.Tensor) and has_kept_size(one):
            set_value(one, other)
