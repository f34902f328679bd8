"""Real values for the small tensors of a simulated step.

Blank tensors (on torch's meta device) have shapes and no values, and models do look at values: where the image tokens
are, how long each image is, whether a mask is full. So integer tensors, and small tensors of any kind, carry their real
value on the CPU with them, and every operation whose inputs are all known is run on the values too. What is computed
from weights or activations has no value: reading it is an error that names the operation. One exception makes mixtures
of experts work: the choice among unknown scores (`topk`, `argmax`, `sort`) is taken to be balanced.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import no_dispatch_modes, operator_of, pytree, schema_of
from lowtide.errors import PlanError
from lowtide.recording import tensors_in
from lowtide.targets.live_module import INTEGERS, MOST_INTEGERS, has_kept_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.simulation.meta_tensors import Shapes

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
    """What is special about an operation: mostly nothing. Looked up once for each, as it is asked for each time."""
    return next((kind for kind, packets in _KINDS.items() if operator_of(func) in packets), "")


def is_blank(thing: Any) -> bool:
    """Whether something is a tensor without numbers."""
    return isinstance(thing, torch.Tensor) and thing.is_meta


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real value of a tensor, if it is known."""
    if is_blank(tensor):
        value: torch.Tensor | None = tensor.__dict__.get("_lowtide_value")
        return value
    return tensor


def give_value(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """From now on the value of a blank tensor is known (or, with None, forgotten)."""
    tensor.__dict__["_lowtide_value"] = value


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor], shapes: Shapes) -> Any:
    """An operation on blank tensors (`inputs` are all of them), and on their values where they are known."""
    kind = _kind(func)
    if kind == "reads" and any(map(is_blank, inputs)):
        return _read(func, args)
    if kind == "copies" and is_blank(args[1]) and not is_blank(args[0]):
        return _copied_to_host(args)
    if kind == "moves" and is_blank(args[0]) and _leaves(kwargs):
        return _moved_to_host(args[0], kwargs)
    if kind == "shaped by values" and any(map(is_blank, inputs)):
        return _shaped_by_values(func, args, kwargs, inputs)
    if kind == "indexed":
        args = (args[0], list(_positions(args[1])), *args[2:])
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}  # host memory here is never written to, so it takes no page
    out = shapes.result(func, args, kwargs)
    _update(func, args, kwargs, inputs, out)
    return out


def _leaves(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


def _copied_to_host(args: tuple[Any, ...]) -> torch.Tensor:
    target: torch.Tensor = args[0]
    value = value_of(args[1])
    if value is not None:
        with no_dispatch_modes():
            target.copy_(value)
    return target


def _moved_to_host(tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    value = value_of(tensor)
    dtype = kwargs.get("dtype") or tensor.dtype
    with no_dispatch_modes():
        if value is not None:
            return value.to(dtype, copy=True)
        return torch.empty(tensor.shape, dtype=dtype)


def _update(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor], out: Any) -> None:
    known = all(value_of(tensor) is not None for tensor in inputs)
    if schema_of(func).is_mutable:
        _update_in_place(func, args, kwargs, known=known)
        return
    results = [tensor for tensor in tensors_in((out,)) if is_blank(tensor)]
    if not results or _kind(func) == "unset":
        return
    if known:
        if all(has_kept_size(tensor) for tensor in results):
            with contextlib.suppress(NotImplementedError):  # the CPU has no such kernel: then its value is unknown
                _attach(out, _on_values(func, args, kwargs))
    elif _kind(func) == "ranking":
        _rank_evenly(results, args[0])


def _update_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, known: bool) -> None:
    """The first argument is written to: a tensor, or a list of them."""
    targets = [tensor for tensor in tensors_in(args[:1]) if is_blank(tensor)]
    if not any(value_of(target) is not None for target in targets):
        return
    if known:
        _on_values(func, args, kwargs)
        return
    for target in targets:
        give_value(target, None)


def _read(func: Any, args: tuple[Any, ...]) -> Any:
    name = operator_of(func).__name__
    values = [_known(tensor, name) for tensor in args if isinstance(tensor, torch.Tensor)]
    with no_dispatch_modes():
        return torch.equal(*values) if name == "equal" else values[0].item()


def _shaped_by_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
    for tensor in inputs:
        _known(tensor, operator_of(func).__name__)
    real = _on_values(func, args, kwargs)
    blank = pytree.tree_map(lambda leaf: _blank_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, real)
    _attach(blank, real)
    return blank


def _positions(indices: Any) -> Iterator[Any]:
    """An index by a mask is an index by the positions where it is true: those have a known shape."""
    for index in indices:
        if not is_blank(index) or index.dtype not in (torch.bool, torch.uint8):
            yield index
            continue
        with no_dispatch_modes():
            columns = [column.contiguous() for column in _known(index, "index").nonzero().unbind(1)]
        for column in columns:
            blank = _blank_like(column)
            give_value(blank, column)
            yield blank


def _rank_evenly(results: list[torch.Tensor], scores: torch.Tensor) -> None:
    """Every class is chosen equally often: the expectation of a router that does its work."""
    for tensor in results:
        if tensor.dtype in INTEGERS and tensor.numel() <= MOST_INTEGERS:
            classes = max(scores.shape[-1] if scores.dim() else 1, 1)
            with no_dispatch_modes():
                give_value(tensor, torch.arange(tensor.numel()).remainder(classes).reshape(tensor.shape))


def _known(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    value = value_of(tensor)
    if value is None:
        raise PlanError(
            f"the model reads a number that only exists at run time ({operation} on a {str(tensor.dtype)[6:]} tensor "
            f"of shape {tuple(tensor.shape)}): this step cannot be simulated without its values. Plan it without the "
            "part that reads it"
        )
    return value


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map(_to_value, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    with no_dispatch_modes():
        return func(*args, **kwargs)


def _to_value(leaf: Any) -> Any:
    if is_blank(leaf):
        return value_of(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _attach(blank: Any, real: Any) -> None:
    for one, other in zip(pytree.tree_leaves(blank), pytree.tree_leaves(real), strict=True):
        if is_blank(one) and isinstance(other, torch.Tensor) and has_kept_size(one):
            give_value(one, other)


def _blank_like(real: torch.Tensor) -> torch.Tensor:
    return torch.empty(real.shape, dtype=real.dtype, device="meta")
