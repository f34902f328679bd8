"""What an operation's results look like.

torch's meta kernels tell, some of them in Python and slowly. A step repeats itself, layer by layer and tile by tile, so
every kind of call (operation, shapes, strides, other arguments) is asked for once. A few kernels refuse to tell though
the real ones run; they are answered here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import operator_of, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """The products of experts. torch's own only knows bfloat16, which is a limit of one GPU kernel."""
    if left.dim() == right.dim() == 2:  # noqa: PLR2004  (the gradient of the weights: one matrix per expert)
        assert offs is not None  # noqa: S101  (two matrices are grouped along the dimension that they share)
        return left.new_empty(offs.numel(), left.shape[0], right.shape[1])
    if left.dim() == right.dim():
        return left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    if left.dim() == 2:  # noqa: PLR2004
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(left.shape[1], right.shape[1])


_RESULTS: dict[Any, Callable[..., torch.Tensor]] = {aten._grouped_mm: _grouped_mm}


class Shapes:
    """Results of operations, from memory where the same kind of call was made before."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._makes_new: dict[Any, bool] = {}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation returns. Views and in-place operations are always run: they are about memory."""
        if func not in self._makes_new:
            self._makes_new[func] = _makes_new(func)
        key = (func, _key(args), _key(tuple(kwargs.items()))) if self._makes_new[func] else None
        if key is None or _UNKNOWN in key:
            return _RESULTS.get(operator_of(func), func)(*args, **kwargs)
        if key not in self._known:
            out = _RESULTS.get(operator_of(func), func)(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.is_meta:
                self._known[key] = _form(out)
            return out
        return _made(self._known[key])


_UNKNOWN = object()


def _makes_new(func: Any) -> bool:
    """Whether an operation returns one tensor with memory of its own."""
    returns = schema_of(func).returns
    return not schema_of(func).is_mutable and len(returns) == 1 and returns[0].alias_info is None


def _key(things: tuple[Any, ...]) -> Any:
    """Arguments as a key; an argument of an unknown kind makes the call one of a kind."""
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


def _made(form: Any) -> torch.Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
