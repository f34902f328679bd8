"""Holds values from forward to backward without holding the graph that they may lead to.

What is noted when a forward runs lives as long as its graph. If it held a tensor of that graph, neither would ever be
freed: reference cycles through C++ are not collected. So a tensor with a graph is held as its data, a container as its
items, a function as its code with the contents of its closure, and any other object weakly.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout}
    | {types.BuiltinFunctionType}
)
"""Kinds of values that never change and refer to no tensor."""

SIMPLE = PLAIN | {tuple}
"""The same and tuples of them."""

CONTAINERS = (list, dict, set, tuple, collections.OrderedDict, collections.deque)
"""Kinds of containers that are looked into; their subclasses may be anything."""

GONE = object()
"""Stands for a value that nobody holds any more."""

_DEPTH = 3


def are_plain(values: Iterable[Any]) -> bool:
    """Return whether all values are of kinds that never change and refer to no tensor."""
    return PLAIN.issuperset(map(type, values))


def is_same_plain(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal and of one kind; False if one is not plain."""
    return one is other or (type(one) is type(other) and type(one) in SIMPLE and bool(one == other))


def items_of(container: Any) -> list[Any]:
    """Return the items of a container; the values, if it is a dictionary."""
    return list(container.values()) if isinstance(container, dict) else list(container)


def rebuilt(container: Any, items: list[Any]) -> Any:
    """Return a container like this one with other items, in their order."""
    kind = type(container)
    if isinstance(container, dict):
        return kind(zip(container, items, strict=True))
    return collections.deque(items, container.maxlen) if kind is collections.deque else kind(items)


def hold(value: Any, depth: int = _DEPTH) -> Callable[[], Any]:
    """Return a function that returns the value as it is now, or `GONE` if nobody has it any more."""
    if type(value) in PLAIN:
        return lambda: value
    if isinstance(value, torch.Tensor):
        return _hold_tensor(value)
    if depth:
        if type(value) in CONTAINERS:
            return _hold_items(value, depth - 1)
        if isinstance(value, types.FunctionType):
            return _hold_function(value, depth - 1)
        if isinstance(value, functools.partial):
            return _hold_partial(value, depth - 1)
    return _hold_weakly(value)


def _hold_tensor(tensor: torch.Tensor) -> Callable[[], Any]:
    if tensor.grad_fn is None:
        return lambda: tensor
    data, reference, requires_grad = tensor.detach(), weakref.ref(tensor), tensor.requires_grad

    def get() -> torch.Tensor:
        held = reference()
        return data.detach().requires_grad_(requires_grad) if held is None else held

    return get


def _hold_items(container: Any, depth: int) -> Callable[[], Any]:
    held = [hold(item, depth) for item in items_of(container)]
    empty = rebuilt(container, [None] * len(held) if isinstance(container, dict) else [])

    def get() -> Any:
        items = [get() for get in held]
        return GONE if any(item is GONE for item in items) else rebuilt(empty, items)

    return get


def _hold_function(function: types.FunctionType, depth: int) -> Callable[[], Any]:
    if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
        return lambda: function
    reference = weakref.ref(function)
    cells = [_hold_cell(cell, depth) for cell in function.__closure__ or ()]
    code, scope, name = function.__code__, function.__globals__, function.__name__
    defaults, keywords = hold(function.__defaults__, depth), hold(function.__kwdefaults__, depth)

    def get() -> Any:
        if (held := reference()) is not None:
            return held
        contents = [get() for get in (*cells, defaults, keywords)]
        if any(content is GONE for content in contents):
            return GONE
        closure = tuple(types.CellType(content) for content in contents[:-2])
        twin = types.FunctionType(code, scope, name, contents[-2], closure)
        twin.__kwdefaults__ = contents[-1]
        return twin

    return get


def _hold_cell(cell: types.CellType, depth: int) -> Callable[[], Any]:
    try:
        return hold(cell.cell_contents, depth)
    except ValueError:  # empty as yet
        return lambda: GONE


def _hold_partial(value: functools.partial[Any], depth: int) -> Callable[[], Any]:
    reference = weakref.ref(value)
    parts = [hold(part, depth) for part in (value.func, value.args, value.keywords)]

    def get() -> Any:
        if (held := reference()) is not None:
            return held
        function, args, kwargs = (get() for get in parts)
        is_gone = any(part is GONE for part in (function, args, kwargs))
        return GONE if is_gone else functools.partial(function, *args, **kwargs)

    return get


def _hold_weakly(value: Any) -> Callable[[], Any]:
    try:
        reference = weakref.WeakMethod(value) if isinstance(value, types.MethodType) else weakref.ref(value)
    except TypeError:  # an object that cannot be referred to weakly
        return lambda: GONE

    def get() -> Any:
        held = reference()
        return GONE if held is None else held

    return get
