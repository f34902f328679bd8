"""Meta tensors: tensors with a shape and no memory, which stand for the simulated device's.

torch's meta kernels tell what an operation's results look like, some of them in Python and slowly. A step repeats
itself, layer by layer and tile by tile, so each kind of call (operation, shapes, strides, other arguments) is asked for
once and then answered from memory. A few meta kernels refuse where the real kernels run; those are answered here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import operator_of, schema_of, storage_key
from lowtide.recording import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten

_UNKNOWN = object()


def is_meta(thing: Any) -> bool:
    """Return whether something is a tensor without memory."""
    return isinstance(thing, torch.Tensor) and thing.is_meta


def meta_like(real: torch.Tensor) -> torch.Tensor:
    """Make a contiguous meta tensor of a tensor's shape and type."""
    return torch.empty(real.shape, dtype=real.dtype, device="meta")


class MetaKernels:
    """Runs operations on meta tensors, and remembers the form of their results."""

    def __init__(self) -> None:
        self._forms: dict[Any, tuple[Any, ...]] = {}
        self._makes_new: dict[Any, bool] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the operation returns. Views and in-place operations always run: they are about memory."""
        if func not in self._makes_new:
            self._makes_new[func] = _makes_new_tensor(func)
        key = (func, _key(args), _key(tuple(kwargs.items()))) if self._makes_new[func] else None
        if key is None or _UNKNOWN in key:
            return _OWN_KERNELS.get(operator_of(func), func)(*args, **kwargs)
        if key not in self._forms:
            out = _OWN_KERNELS.get(operator_of(func), func)(*args, **kwargs)
            if _shares_memory(out, args):  # `_unsafe_view` is a view, and its schema does not say so
                self._makes_new[func] = False
            elif isinstance(out, torch.Tensor) and out.is_meta:
                self._forms[key] = _form(out)
            return out
        return _from_form(self._forms[key])


def _makes_new_tensor(func: Any) -> bool:
    """Return whether an operation returns one tensor with memory that no argument shares."""
    returns = schema_of(func).returns
    return not schema_of(func).is_mutable and len(returns) == 1 and returns[0].alias_info is None


def _shares_memory(out: Any, args: tuple[Any, ...]) -> bool:
    if not isinstance(out, torch.Tensor):
        return False
    storage = storage_key(out.untyped_storage())
    return any(storage_key(tensor.untyped_storage()) == storage for tensor in tensors_in(args))


def _key(things: tuple[Any, ...]) -> Any:
    """Turn arguments into a key; a tensor with memory among them makes the call unlike any other."""
    parts = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            if not thing.is_meta:
                return _UNKNOWN
            parts.append(_form(thing))
        elif isinstance(thing, list | tuple):
            inner = _key(tuple(thing))
            if inner is _UNKNOWN:
                return _UNKNOWN
            parts.append((type(thing).__name__, inner))
        else:
            parts.append((type(thing), thing))
    return tuple(parts)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _from_form(form: Any) -> torch.Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """Return the products of experts. torch's meta kernel takes bfloat16 alone, which is a limit of one GPU kernel."""
    if left.dim() == right.dim() == 2:  # noqa: PLR2004  (the gradient of the weights: one matrix per expert)
        assert offs is not None  # noqa: S101  (two matrices are grouped along the dimension that they share)
        return left.new_empty(offs.numel(), left.shape[0], right.shape[1])
    if left.dim() == right.dim():
        return left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    if left.dim() == 2:  # noqa: PLR2004
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(left.shape[1], right.shape[1])


_OWN_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {aten._grouped_mm: _grouped_mm}
