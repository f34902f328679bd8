"""Notes what modules hold in plain attributes, and puts it back: counters, schedules, lists, tensors beside buffers.

A forward may read an attribute, and change it; the program may change it before backward: a schedule of dropout's `p`,
`model.eval()`, another adapter, a mask for the next batch, another part. A recompute must find what the forward found,
and leave what is there. Values that never change (numbers, strings, types) are noted for all parts at once, which takes
little time; those that hold more are noted one by one (`noted_places`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lowtide._torch import REPLICATE, children_of, forward_hooks_of, have_forward_hooks, parts_of
from lowtide.closures import WITH_STATE, is_plain_object
from lowtide.held_values import CONTAINERS, PLAIN, SIMPLE, are_plain, is_same_plain
from lowtide.noted_places import FUNCTIONS, NotedPlaces, put_back_afterwards
from lowtide.weights import is_fsdp1

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowtide.closures import Place

_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What every module has, which is torch's business."""
_POLICIES = frozenset({"compile", REPLICATE})
"""What a policy puts into a module, beside its forward."""
_MISSING = object()


class AttributeHabits:
    """Knows which attributes the parts of a region have, and their kinds. It looks again when their number changes."""

    def __init__(self) -> None:
        self._layout = _Layout.of([], skip_forward=False)
        self._with_hidden: AttributeHabits | None = None
        self._ancestors: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules in attributes that have the region as a part: what they hold is not what it computes with."""

    def note(
        self, parts: list[nn.Module], roots: int, *, skip_forward: bool, have_hooks: bool
    ) -> tuple[list[nn.Module], NotedAttributes]:
        """Note the attributes of parts, the first of which are whole modules (`roots`), and which parts there are.

        `skip_forward` says that the first one's own forward is what runs, whatever stands in its place, and
        `have_hooks` whether there are hooks, which may have a state. All parts are returned, too: with those that are
        held in attributes, unregistered.
        """
        noted = self._note(parts, roots, skip_forward=skip_forward, have_hooks=have_hooks)
        if noted.places is None or not (hidden := self._hidden(noted.places.modules, parts)):
            return parts, noted
        parts = parts_of([*parts[:roots], *hidden])
        self._with_hidden = self._with_hidden or AttributeHabits()
        return parts, self._with_hidden._note(
            parts, roots + len(hidden), skip_forward=skip_forward, have_hooks=have_hooks
        )

    def _hidden(self, modules: list[nn.Module], parts: list[nn.Module]) -> list[nn.Module]:
        if not modules:
            return []
        known = {*parts, *self._ancestors}
        hidden = [module for module in dict.fromkeys(modules) if module not in known]
        self._ancestors.update(module for module in hidden if not known.isdisjoint(module.modules()))
        return [module for module in hidden if module not in self._ancestors]

    def _note(self, parts: list[nn.Module], roots: int, *, skip_forward: bool, have_hooks: bool) -> NotedAttributes:
        own, layout = [*map(_attributes_of, parts)], self._layout
        if layout.key != hash((*map(id, parts), *map(len, own))):
            layout = self._layout = _Layout.of(parts, skip_forward=skip_forward)
        values = layout.values_in(own)
        if values is None:  # an attribute is gone, or holds something else
            layout = self._layout = _Layout.of(parts, skip_forward=skip_forward)
            values = [*map(operator.call, layout.get, own)]
        noted = NotedAttributes(parts, roots, layout, values)
        if layout.others or have_hooks:
            noted.places = NotedPlaces([(own[index], name) for index, name in layout.others])
            noted.places.add((vars(holder), name) for holder in _hooks_with_state(parts) for name in vars(holder))
        return noted


class NotedAttributes:
    """The parts of modules and their attributes as they were when a forward began."""

    __slots__ = ("_layout", "_leaves_parts", "_parts", "_roots", "_values", "places")

    def __init__(self, parts: list[nn.Module], roots: int, layout: _Layout, values: list[tuple[Any, ...]]) -> None:
        self._parts = parts
        self._roots = roots
        self._layout = layout
        self._values = values
        self._leaves_parts = False
        """Whether the forward has put other parts in the places of some."""
        self.places: NotedPlaces | None = None

    def settle(self) -> None:
        """Leave the parts to a forward that has put others in their places."""
        self._leaves_parts = parts_of(self._parts[: self._roots]) != self._parts

    def are_unchanged(self) -> bool:
        """Return whether the values are what they were, and there is nothing else to put back."""
        if self.places is not None and not self.places.are_unchanged():
            return False
        parts, layout = parts_of(self._parts[: self._roots]), self._layout
        own = [*map(_attributes_of, parts)]
        if hash((*map(id, parts), *map(len, own))) != layout.key:
            return False
        try:
            return [*map(operator.call, layout.get, own)] == self._values
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or holds a tensor or an array
            return False

    @contextlib.contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Let the parts find their attributes inside as they were noted, and leave them as they are now."""
        plain = [
            (held, attribute, value)
            for held, names, values in zip(map(vars, self._parts), self._layout.names, self._values, strict=True)
            for attribute, value in zip(names, values, strict=True)
            if not is_same_plain(held.get(attribute, _MISSING), value)
        ]
        added = [*self._added()]
        with contextlib.ExitStack() as stack:
            if not self._leaves_parts and parts_of(self._parts[: self._roots]) != self._parts:
                stack.enter_context(self._parts_restored())
            if self.places is not None:
                stack.enter_context(self.places.restored(name))
            stack.enter_context(put_back_afterwards([*((held, attribute) for held, attribute, _ in plain), *added]))
            for held, attribute, value in plain:
                held[attribute] = value
            for place, attribute in added:
                del place[attribute]
            yield

    def _added(self) -> Iterator[Place]:
        """Yield the attributes that were not there. Objects of unknown kinds are left alone."""
        for held, known in zip(map(vars, self._parts), self._layout.known, strict=True):
            for name in () if known is None else held.keys() - known:
                if _kind_of(name, held[name]) is not None or name == "forward":
                    yield held, name

    @contextlib.contextmanager
    def _parts_restored(self) -> Iterator[None]:
        """Let each part have the children that it had."""
        places = [children_of(part) for part in self._parts]
        now = [dict(place) for place in places]
        parts = iter(self._parts[self._roots :])
        noted = [
            {name: next(parts) if is_there else None for name, is_there in names.items()}
            for names in self._layout.children
        ]
        try:
            for place, children in zip(places, noted, strict=True):
                _fill(place, children)
            yield
        finally:
            for place, children in zip(places, now, strict=True):
                _fill(place, children)


def _fill(place: dict[str, Any], content: dict[str, Any]) -> None:
    place.clear()
    place.update(content)


# --- Kinds of attributes --------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Which attributes some parts have: for each part the names of its plain values, and how to get them at once."""

    key: int
    """What changes with the parts and the number of their attributes."""
    names: list[list[str]]
    get: list[Callable[[dict[str, Any]], tuple[Any, ...]]]
    others: list[tuple[int, str]]
    """Parts by number, and the names of attributes that hold more than a plain value."""
    children: list[dict[str, bool]]
    """The names of the parts that each part has, and whether there was one."""
    known: list[frozenset[str] | None]
    """The names of all attributes of each part; None for one whose attributes come and go."""

    @classmethod
    def of(cls, parts: list[nn.Module], *, skip_forward: bool) -> _Layout:
        own = [*map(_attributes_of, parts)]
        kinds = [{name: _kind_of(name, value) for name, value in held.items()} for held in own]
        managed = {inner for part in parts if _is_managed(part) for inner in part.modules()}
        for part, found in zip(parts, kinds, strict=True):
            if part in managed:
                found.update({name: None for name, kind in found.items() if kind == "other"})
        if skip_forward and parts:
            kinds[0]["forward"] = None
        names = [[name for name, kind in found.items() if kind == "plain"] for found in kinds]
        return cls(
            _key_of(parts, own),
            names,
            [_getter(found) for found in names],
            [(index, name) for index, found in enumerate(kinds) for name, kind in found.items() if kind == "other"],
            [{name: child is not None for name, child in children_of(part).items()} for part in parts],
            [None if part in managed else frozenset(held) for part, held in zip(parts, own, strict=True)],
        )

    def values_in(self, own: list[dict[str, Any]]) -> list[tuple[Any, ...]] | None:
        """Return the plain values of all parts; None if one is gone, or not plain any more."""
        try:
            values = [*map(operator.call, self.get, own)]
        except KeyError:
            return None
        return values if SIMPLE.issuperset(map(type, itertools.chain.from_iterable(values))) else None


def _key_of(parts: list[nn.Module], own: list[dict[str, Any]]) -> int:
    return hash((*map(id, parts), *map(len, own)))


def _is_managed(part: nn.Module) -> bool:
    """Return whether lists and tensors in a part are the state of an engine that gathers and frees weights."""
    return is_fsdp1(part) or type(part).__module__.partition(".")[0] in (
        "accelerate",
        "deepspeed",
        "transformer_engine",
    )


def _getter(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if not names:
        return _nothing
    if len(names) == 1:
        names *= 2  # an itemgetter of one name returns no tuple
    return operator.itemgetter(*names)


def _nothing(_attributes: dict[str, Any]) -> tuple[Any, ...]:
    return ()


_attributes_of = operator.attrgetter("__dict__")


def _kind_of(name: str, value: Any) -> str | None:
    """Return whether an attribute is noted among plain values or by itself; None if it is left alone."""
    if name in _OWN or name in _POLICIES or (name == "forward" and hasattr(value, "is_activation_policy")):
        return None
    kind = type(value)
    if kind in PLAIN or (kind is tuple and are_plain(value)):
        return "plain"
    is_other = (
        isinstance(value, (torch.Tensor, nn.Module, np.ndarray, *FUNCTIONS)) or kind in CONTAINERS or kind in WITH_STATE
    )
    return "other" if is_other else None


def _hooks_with_state(parts: list[nn.Module]) -> Iterator[Any]:
    """Yield the objects behind the parts' forward hooks, but for those of libraries, which know what they do."""
    if not have_forward_hooks(parts):
        return
    for hook in (hook for part in parts for place in forward_hooks_of(part)[:2] for hook in place.values()):
        function = hook.func if isinstance(hook, functools.partial) else hook
        holder = getattr(function, "__self__", function)
        is_state = not isinstance(holder, nn.Module | types.FunctionType) and is_plain_object(holder)
        if is_state and isinstance(holder, Hashable):
            yield holder


NO_ATTRIBUTES = NotedAttributes([], 0, _Layout.of([], skip_forward=False), [])
