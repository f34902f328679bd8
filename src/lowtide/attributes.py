"""Notes what modules hold in plain attributes, and puts it back: counters, schedules, lists, tensors beside buffers.

A forward may read a number from an attribute, and change it; the program may change it before backward (a schedule of
dropout's `p`, `model.eval()`). A recompute must find what the forward found, and leave what is there. Numbers are noted
at each call. Tensors, lists, dictionaries and generators are noted only once a close look at a call has shown that a
forward changes them: small ones as copies, and of large ones only that a recompute must not leave its own.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lowtide._torch import hooks_of, version_if_any
from lowtide.buffers import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Recall = Callable[[dict[str, Any], str], object]

_NUMBERS = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set)
_SIMPLE = frozenset({*_NUMBERS, *_CONTAINERS})
_OWN = frozenset(vars(nn.Module())) | {"forward"}
"""What every module has, which is torch's business, and what a policy puts there."""
_LIBRARIES = ("accelerate", "builtins", "deepspeed", "lowtide", "peft", "torch", "transformers")
_MISSING = object()


class AttributeHabits:
    """Which attributes of a region's parts hold numbers, and which others its forward was seen to change."""

    def __init__(self) -> None:
        self._layout: list[int] = []
        self._numbers = _numbers_of([])
        self._changing: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    def note(self, parts: list[nn.Module]) -> NotedAttributes:
        """Note the numbers of all parts, and what is known to change."""
        layout = [*map(id, parts)]
        if layout != self._layout:
            self._layout, self._numbers = layout, _numbers_of(parts)
        try:
            noted = NotedAttributes(parts, self._numbers)
        except KeyError:  # an attribute is gone
            self._numbers = _numbers_of(parts)
            noted = NotedAttributes(parts, self._numbers)
        if self._changing:
            known = [(vars(holder), name) for holder, names in self._changing.items() for name in names]
            noted.others = [(held, name, _recall(held.get(name, _MISSING))) for held, name in known]
        return noted

    def learn(self, holder: Any, name: str) -> None:
        """Remember that a forward changes this attribute of a part or of a hook."""
        self._changing.setdefault(holder, set()).add(name)
        self._layout = []  # a number may have come or gone


class NotedAttributes:
    """The attributes of a module's parts as they were when a forward began."""

    __slots__ = ("_numbers", "_parts", "_values", "others")

    def __init__(self, parts: list[nn.Module], numbers: _Numbers) -> None:
        self._parts = parts
        self._numbers = numbers
        self._values = [*map(operator.call, numbers.get, map(_attributes_of, parts))]
        self.others: list[tuple[dict[str, Any], str, Recall]] = []

    def are_unchanged(self) -> bool:
        """Return whether the numbers are what they were, and there is nothing else to put back."""
        if self.others:
            return False
        try:
            return [*map(operator.call, self._numbers.get, map(_attributes_of, self._parts))] == self._values
        except KeyError:  # an attribute is gone
            return False

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the parts find their attributes inside as they were noted, and leave them as they are now."""
        numbers = [
            (vars(part), name, _recall(value))
            for part, names, values in zip(self._parts, self._numbers.names, self._values, strict=True)
            for name, value in zip(names, values, strict=True)
            if vars(part).get(name, _MISSING) != value
        ]
        places = [*numbers, *self.others]
        now = [(held, name, _put_back(held.get(name, _MISSING))) for held, name, _ in places]
        try:
            for held, name, recall in places:
                recall(held, name)
            yield
        finally:
            for held, name, put_back in now:
                put_back(held, name)


class AttributeLook:
    """A close look at one call: what a forward might change in attributes of parts and of their hooks."""

    def __init__(self, parts: list[nn.Module]) -> None:
        holders = dict.fromkeys([*parts, *_hooks_with_state(parts)])
        self._before = [(holder, _traces(holder)) for holder in holders]

    def learn(self, habits: AttributeHabits, noted: NotedAttributes) -> None:
        """Compare with what is there now; add what changed to the habits and to what was noted before the call."""
        noted.others = []
        for holder, before in self._before:
            held, now = vars(holder), _traces(holder)
            for name in before.keys() | now.keys():
                trace = before.get(name)
                if trace is not None and name in now and trace.is_same(now[name]):
                    continue
                habits.learn(holder, name)
                noted.others.append((held, name, _recall(_MISSING) if trace is None else trace.recall))


class _Trace(NamedTuple):
    """What an attribute held: the object, the items in it, and versions of tensors; and how to have it again."""

    value: Any
    items: list[Any]
    versions: list[int]
    state: torch.Tensor | None
    recall: Recall

    def is_same(self, other: _Trace) -> bool:
        if isinstance(self.value, _NUMBERS):
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        if self.value is not other.value or len(self.items) != len(other.items) or self.versions != other.versions:
            return False
        is_same_state = self.state is None or other.state is None or torch.equal(self.state, other.state)
        return is_same_state and all(a is b for a, b in zip(self.items, other.items, strict=True))


def _hooks_with_state(parts: list[nn.Module]) -> Iterator[Any]:
    """Yield the objects behind the parts' forward hooks, but for those of libraries, which know what they do."""
    hooks = [
        hook for part in parts for kind, own in hooks_of(part).items() if "forward" in kind for hook in own.values()
    ]
    for hook in hooks:
        function = hook.func if isinstance(hook, functools.partial) else hook
        holder = getattr(function, "__self__", function)
        is_plain = not isinstance(holder, nn.Module | types.FunctionType) and hasattr(holder, "__dict__")
        if is_plain and isinstance(holder, Hashable) and type(holder).__module__.partition(".")[0] not in _LIBRARIES:
            yield holder


def _traces(holder: Any) -> dict[str, _Trace]:
    return {
        name: _trace(value)
        for name, value in vars(holder).items()
        if name not in _OWN and (type(value) in _SIMPLE or isinstance(value, (torch.Tensor, torch.Generator)))
    }


def _trace(value: Any) -> _Trace:
    items = _items(value)
    versions = [version_if_any(item) for item in items if isinstance(item, torch.Tensor)]
    state = value.get_state() if isinstance(value, torch.Generator) else None
    return _Trace(value, items, versions, state, _recall(value))


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, _CONTAINERS) else [value]


class _Numbers(NamedTuple):
    """For each part the names of its numbers, and a function that gets all of them from its dictionary at once."""

    names: list[list[str]]
    get: list[Callable[[dict[str, Any]], tuple[Any, ...]]]


def _numbers_of(parts: list[nn.Module]) -> _Numbers:
    names = [_names_of_numbers(part) for part in parts]
    return _Numbers(names, [operator.itemgetter(*found) if found else _no_numbers for found in names])


def _names_of_numbers(part: nn.Module) -> list[str]:
    names = [n for n, value in vars(part).items() if type(value) in _NUMBERS and (n not in _OWN or n == "training")]
    return names * 2 if len(names) == 1 else names  # an itemgetter of one name returns no tuple


def _no_numbers(_attributes: dict[str, Any]) -> tuple[Any, ...]:
    return ()


_attributes_of = operator.attrgetter("__dict__")


NO_ATTRIBUTES = NotedAttributes([], _numbers_of([]))


def _recall(value: Any) -> Recall:
    """Return a function that puts a copy of `value`, as it is now, into a place.

    It leaves large tensors alone, and those with a graph: the graph holds what is noted, and would never be freed.
    """
    if value is _MISSING:
        return _remove
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda _held, _name: value.set_state(state)
    if not all(_is_small_state(item) for item in _items(value) if isinstance(item, torch.Tensor)):
        return _leave
    kept = _copied(value)
    return lambda held, name: held.__setitem__(name, _copied(kept))


def _put_back(value: Any) -> Recall:
    """Return a function that puts `value` itself back into its place."""
    if value is _MISSING:
        return _remove
    return _recall(value) if isinstance(value, torch.Generator) else lambda held, name: held.__setitem__(name, value)


def _remove(held: dict[str, Any], name: str) -> None:
    held.pop(name, None)


def _leave(_held: dict[str, Any], _name: str) -> None:
    """Leave a place as it is."""


def _copied(value: Any) -> Any:
    """Return a tensor's copy, a copy of a list, a dictionary or a set with copies of its tensors, or the number."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: item.detach().clone() if isinstance(item, torch.Tensor) else item for key, item in value.items()}
    if isinstance(value, list):
        return [item.detach().clone() if isinstance(item, torch.Tensor) else item for item in value]
    return set(value) if isinstance(value, set) else value


def _is_small_state(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and tensor.layout is torch.strided and tensor.nbytes <= SMALL_BYTES
