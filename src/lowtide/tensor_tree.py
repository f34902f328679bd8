"""Takes the tensors out of nested values, and puts other tensors in their place.

Torch's checkpoint makes only top-level positional tensors visible to saved-tensor hooks. A region's hidden state may
just as well be a keyword, or be in a tuple, in a dataclass or bound in a `functools.partial`; left there, it stays on
the device and no hook ever sees it. So a call's arguments are taken apart into tensors, which are passed one by one,
and a tree that remembers where they belong.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import torch

from lowtide._torch import pytree


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    index: int


class TensorTree:
    """A nested value with numbered slots where its tensors were. It holds no tensor."""

    __slots__ = ("_tree",)

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def unflatten(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the value with these tensors. Containers that held tensors are new; all else is the same object."""
        return _fill(self._tree, tensors)


def flatten(value: Any) -> tuple[list[torch.Tensor], TensorTree]:
    """Return all tensors in `value`, in order, and the tree with a slot for each."""
    tensors: list[torch.Tensor] = []
    return tensors, TensorTree(_take(value, tensors, {}, frozenset()))


class _Container:
    """A container that held tensors, taken apart: how to build it again, and its items."""

    __slots__ = ("build", "items")

    def __init__(self, build: Any, items: list[Any]) -> None:
        self.build = build
        self.items = items


def _take(value: Any, tensors: list[torch.Tensor], slots: dict[int, _Slot], around: frozenset[int]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in slots:  # one object, one slot: attention checks whether `query is key`
            tensors.append(value)
            slots[id(value)] = _Slot(len(tensors) - 1)
        return slots[id(value)]
    parts = _parts(value) if id(value) not in around else None  # an object may hold itself
    if parts is None:
        return value
    build, items = parts
    taken = [_take(item, tensors, slots, around | {id(value)}) for item in items]
    has_tensors = any(type(item) in (_Slot, _Container) for item in taken)
    return _Container(build, taken) if has_tensors else value


def _fill(tree: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if type(tree) is _Slot:
        return tensors[tree.index]
    if type(tree) is _Container:
        return tree.build([_fill(item, tensors) for item in tree.items])
    return tree


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
