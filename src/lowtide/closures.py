"""Finds what a function computes with beside tensors that it is given: closure, defaults, bound object, globals.

`checkpoint(lambda t: layer(t), x)` is run again in backward, when `layer` may long be another one: a loop has gone on.
So it is looked up what such a function reaches: modules, and the places that it reads, which can be noted and filled
again. Lists and dictionaries are looked into, plain objects for what they hold, and functions for their closures.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lowtide.held_values import CONTAINERS, PLAIN, are_plain, items_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Place = tuple[MutableMapping[Any, Any], Any]

_DEPTH = 3
"""How far it is looked: from a function to its closure's list to a function in that."""

WITH_STATE = frozenset({torch.Generator, np.random.Generator, np.random.RandomState, random.Random})
"""Kinds of objects whose contents can be noted, and put back into the same object."""

KNOWN_INPUTS = PLAIN | {torch.Tensor, nn.Parameter}
"""Kinds of arguments in which there is nothing to look for."""

_LIBRARIES = ("accelerate", "builtins", "deepspeed", "lowtide", "numpy", "peft", "torch", "transformers")


class Reached(NamedTuple):
    """The modules that a function reaches, and the places that it reads: mappings and keys."""

    modules: list[nn.Module]
    places: list[Place]

    def __bool__(self) -> bool:
        return bool(self.modules or self.places)


def reached_by(function: Callable[..., Any] | None, args: Iterable[Any]) -> Reached:
    """Return what a call of a function reaches, but for tensors among its arguments."""
    search = _Search()
    search.visit(function, _DEPTH)
    for value in args:
        search.visit_argument(value)
    return Reached([*search.modules], [*search.places.values()])


class _Search:
    """Goes through values once each."""

    def __init__(self) -> None:
        self.modules: dict[nn.Module, None] = {}
        self.places: dict[tuple[int, Any], Place] = {}
        self._seen: dict[int, Any] = {}

    def visit_argument(self, value: Any) -> None:
        """Look at an argument, nested however deeply. Tensors in containers are inputs, and known."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if type(value) in WITH_STATE:
                self._place({"argument": value}, "argument", 0)
            elif type(value) in CONTAINERS:
                if id(value) not in self._seen and not are_plain(items_of(value)):
                    self._seen[id(value)] = value
                    waiting += items_of(value)
            elif not (isinstance(value, torch.Tensor) or type(value) in PLAIN):
                self.visit(value, 1)

    def visit(self, value: Any, depth: int) -> None:
        """Look at a value that a function reaches."""
        if isinstance(value, nn.Module):
            self.modules[value] = None
            return
        if not depth or type(value) in PLAIN or isinstance(value, torch.Tensor) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part, depth)
            self._places_of(dict(enumerate(value.args)) | value.keywords, depth - 1)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__, depth)
            self.visit(value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth - 1)
        elif type(value) in CONTAINERS:
            for item in items_of(value):
                self.visit(item, depth - 1)
        elif is_plain_object(value):
            self._places_of(vars(value), depth - 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        self._places_of(Cells(function), depth)
        defaults = {f"default {number}": value for number, value in enumerate(function.__defaults__ or ())}
        for held in (defaults, function.__kwdefaults__ or {}):
            for name in [name for name, value in held.items() if type(value) not in PLAIN]:
                self._place(held, name, depth)
        scope = {} if is_of_library(function.__module__) else function.__globals__
        for name in function.__code__.co_names:
            if name in scope and _is_state(scope[name]):
                self._place(scope, name, depth)

    def _places_of(self, held: MutableMapping[Any, Any], depth: int) -> None:
        for name in list(held):
            self._place(held, name, depth)

    def _place(self, held: MutableMapping[Any, Any], name: Any, depth: int) -> None:
        self.places[id(held), name] = held, name
        self.visit(held[name], depth)


class Cells(MutableMapping[int, Any]):
    """The contents of a function's closure, by number; empty cells are left out."""

    def __init__(self, function: types.FunctionType) -> None:
        self._cells = function.__closure__ or ()

    def __getitem__(self, number: int) -> Any:
        try:
            return self._cells[number].cell_contents
        except ValueError:
            raise KeyError(number) from None

    def __setitem__(self, number: int, value: Any) -> None:
        self._cells[number].cell_contents = value

    def __delitem__(self, number: int) -> None:
        del self._cells[number].cell_contents

    def __iter__(self) -> Iterator[int]:
        return (number for number in range(len(self._cells)) if number in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_state(value: Any) -> bool:
    """Return whether a global is data: not a function, a class or a Python module."""
    kind = type(value)
    return isinstance(value, (nn.Module, torch.Tensor)) or kind in PLAIN or kind in WITH_STATE or kind in CONTAINERS


def is_plain_object(value: Any) -> bool:
    """Return whether a value is an object of a program's own class, and not of a library, which knows what it does."""
    is_class = isinstance(value, type | types.ModuleType)
    return not is_class and hasattr(value, "__dict__") and not is_of_library(type(value).__module__)


def is_of_library(module: str | None) -> bool:
    """Return whether a Python module belongs to a library that knows what it does."""
    return (module or "").partition(".")[0] in _LIBRARIES
