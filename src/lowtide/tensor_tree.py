"""Takes the tensors out of nested values, and puts other tensors in their place.

Torch's checkpoint makes only top-level positional tensors visible to saved-tensor hooks. A region's hidden state may
just as well be a keyword, or be in a tuple, in a dataclass or bound in a `functools.partial`; left there, it stays on
the device and no hook ever sees it. So a call's arguments are taken apart into tensors, which are passed one by one,
and a tree that remembers where they belong.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lowtide._torch import is_view, pytree, storage_key, transforms_around

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


COPIED_BYTES = 4096
"""Arrays and tensors in host memory up to this size are copied rather than watched: see `TensorTree.take_copies`."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Kinds of arguments that hold no tensor."""

_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter)
"""Kinds of tensors that have memory of their own; a subclass may be a wrapper around others."""


class _Slot(int):
    """The number of the tensor that belongs here."""


class TensorTree:
    """A nested value with numbered slots where its tensors were. It holds no tensor but the copies it has taken."""

    __slots__ = ("_copies", "_tree", "may_hide_tensors")

    def __init__(self, tree: Any, *, may_hide_tensors: bool = False) -> None:
        self._tree = tree
        self._copies: dict[int, torch.Tensor] = {}
        self.may_hide_tensors = may_hide_tensors
        """Whether the value holds an object of an unknown kind, which is passed on as it is."""

    def take_copies(self, tensors: list[torch.Tensor], buffers: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Keep copies of small tensors in host memory that need no gradient, and return the other tensors.

        A counter that the loop moves on, or a state that the region itself updates, has another value in backward than
        it had in forward. With a copy the recompute sees what forward saw, and updates nothing a second time. A tensor
        that shares memory with another one, or with `buffers`, is left alone: what changes the one changes the other.
        """
        small = [i for i, tensor in enumerate(tensors) if not tensor.requires_grad and _is_small_state(tensor)]
        if not small or transforms_around():
            return tensors
        plain = [tensor for tensor in (*tensors, *buffers) if tensor.is_cpu and type(tensor) in _WITH_STORAGE]
        storages = [storage_key(tensor.untyped_storage()) for tensor in plain if tensor.layout is torch.strided]
        for index in small:
            if storages.count(storage_key(tensors[index].untyped_storage())) == 1:
                self._copies[index] = tensors[index].clone()
        return [tensor for index, tensor in enumerate(tensors) if index not in self._copies]

    def unflatten(self, tensors: Sequence[torch.Tensor], *, again: bool = False) -> Any:
        """Return the value with these tensors. Containers that held tensors are new; all else is the same object.

        With `again`, the lists and dictionaries that held none are new, too, and hold what they held at first.
        """
        return _fill(self._tree, self._with_copies(tensors) if self._copies else tensors, again=again)

    def _with_copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all tensors in order: each copy is copied again, for whoever gets it may change it."""
        others = iter(tensors)
        count = len(tensors) + len(self._copies)
        return [self._copies[index].clone() if index in self._copies else next(others) for index in range(count)]


def flatten(value: Any) -> tuple[list[torch.Tensor], TensorTree]:
    """Return all tensors in `value`, in order, and the tree with a slot for each. Any depth will do."""
    tensors: list[torch.Tensor] = []
    tree, is_plain = _take(value, tensors)
    return tensors, TensorTree(tree, may_hide_tensors=not is_plain)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], TensorTree]:
    """Return what `flatten((args, kwargs))` does, in no time for a call with one tensor."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return [*args], _OneTensor(None)
    return flatten((args, kwargs))


class _OneTensor(TensorTree):
    """The arguments of a call whose only argument is a tensor."""

    __slots__ = ()

    def unflatten(self, tensors: Sequence[torch.Tensor], *, again: bool = False) -> Any:  # noqa: ARG002
        """Return the arguments and keywords with this tensor."""
        return tuple(self._with_copies(tensors) if self._copies else tensors), {}


def _is_small_state(tensor: torch.Tensor) -> bool:
    if not tensor.is_cpu or type(tensor) is not torch.Tensor:
        return False
    is_small = tensor.layout is torch.strided and tensor.nbytes <= COPIED_BYTES
    return is_small and not is_view(tensor) and not vars(tensor)  # a copy has no attributes of its own


class _Container:
    """A container that held tensors, taken apart: how to build it again, and its items."""

    __slots__ = ("build", "items")

    def __init__(self, build: Any, items: list[Any]) -> None:
        self.build = build
        self.items = items


class _Plain(_Container):
    """A container that held no tensor, and may be changed: itself as well."""

    __slots__ = ("whole",)

    def __init__(self, build: Any, items: list[Any], whole: Any) -> None:
        super().__init__(build, items)
        self.whole = whole


class _Array(NamedTuple):
    """The copy of an array."""

    copy: np.ndarray


def _only_copy(items: list[Any]) -> np.ndarray:
    array: np.ndarray = items[0].copy.copy()
    return array


_MUTABLE = (list, dict, collections.OrderedDict, collections.defaultdict, collections.deque)


def _taken_apart(container: Any, build: Any, items: list[Any]) -> Any:
    """Return a container as a part of a tree; the container itself, if it holds no tensor and cannot be changed."""
    kinds = {type(item) for item in items}
    if not kinds.isdisjoint((_Slot, _Container)):
        return _Container(build, items)
    return _Plain(build, items, container) if type(container) in _MUTABLE or _Plain in kinds else container


def _take(value: Any, tensors: list[torch.Tensor]) -> tuple[Any, bool]:
    """Take `value` apart, and return its tree and whether all of its kinds are known. Tensors go to `tensors`."""
    slots: dict[int, _Slot] = {}
    is_plain = True
    whole: list[Any] = []
    around: list[tuple[Any, Any, Iterator[Any], list[Any]]] = [(None, None, iter((value,)), whole)]
    """The containers that are open, outermost first: each with its items to come and those that were taken."""
    ids: set[int] = set()
    while True:
        container, build, items, taken = around[-1]
        for item in items:
            if isinstance(item, torch.Tensor):
                if id(item) not in slots:  # one object, one slot: attention checks whether `query is key`
                    slots[id(item)] = _Slot(len(tensors))
                    tensors.append(item)
                taken.append(slots[id(item)])
            elif type(item) is np.ndarray and item.nbytes <= COPIED_BYTES:
                taken.append(_Plain(_only_copy, [_Array(item.copy())], item))
            elif type(item) in _PLAIN or id(item) in ids:  # an object may hold itself
                taken.append(item)
            elif (parts := _parts(item)) is None:
                is_plain = False
                taken.append(item)
            else:
                ids.add(id(item))
                around.append((item, parts[0], iter(parts[1]), []))
                break
        else:
            around.pop()
            if not around:
                return whole[0], is_plain
            ids.discard(id(container))
            around[-1][3].append(_taken_apart(container, build, taken))


def _fill(tree: Any, tensors: Sequence[torch.Tensor], *, again: bool) -> Any:
    whole: list[Any] = []
    around: list[tuple[Any, Iterator[Any], list[Any]]] = [(None, iter((tree,)), whole)]
    while True:
        build, items, filled = around[-1]
        for item in items:
            if type(item) is _Slot:
                filled.append(tensors[item])
            elif type(item) is _Plain and not again:
                filled.append(item.whole)
            elif isinstance(item, _Container):
                around.append((item.build, iter(item.items), []))
                break
            else:
                filled.append(item)
        else:
            around.pop()
            if not around:
                return whole[0]
            around[-1][2].append(build(filled))


def _parts(value: Any) -> tuple[Any, list[Any]] | None:
    """Return how to build a container from a list of items, and its items; None for anything else."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, list(value)
    if kind is dict:
        keys = list(value)
        return (lambda items: dict(zip(keys, items, strict=True))), list(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (lambda items: kind(*items)), list(value)
    if kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        items, context = node.flatten_fn(value)
        return (lambda items: node.unflatten_fn(items, context)), list(items)
    is_instance_of_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return _dataclass_parts(value) if is_instance_of_dataclass else None


def _dataclass_parts(value: Any) -> tuple[Any, list[Any]]:
    """Return how to copy a dataclass with other values: not by `__init__`, which may be custom, or the class frozen."""
    stored = {}
    for field in dataclasses.fields(value):
        with contextlib.suppress(AttributeError):  # a field that was never set
            stored[field.name] = object.__getattribute__(value, field.name)  # transformers' configurations may refuse
    names = list(stored)
    empty = copy.copy(value)
    for name in names:
        object.__setattr__(empty, name, None)

    def build(items: list[Any]) -> Any:
        again = copy.copy(empty)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(again, name, item)
        return again

    return build, list(stored.values())
