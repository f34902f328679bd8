"""Notes what places hold that hold more than a plain value: attributes, the cells of a closure, globals.

A place is a mapping and a key. A container is noted by its items, a small tensor as a copy, a random generator by its
state, a function or a module by which one it is. A large tensor is held as it is, without its graph: it is put back if
it was replaced, and whoever runs a forward again must refuse it if its contents were changed (`weights`).
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lowtide._torch import is_functorch_wrapped, version_if_any
from lowtide.buffers import SMALL_BYTES
from lowtide.closures import WITH_STATE
from lowtide.errors import InPlaceError
from lowtide.held_values import CONTAINERS, GONE, PLAIN, are_plain, hold, is_same_plain, items_of, rebuilt
from lowtide.weights import is_gathered, watched

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableMapping

    from lowtide.closures import Place
    from lowtide.weights import Weight

FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
"""Kinds of functions that are noted."""

_MISSING = object()


class NotedPlaces:
    """What some places held as a forward began, each a mapping and a key: attributes, the cells of a closure."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._noted: list[tuple[MutableMapping[Any, Any], Any, _Noted]] = []
        self.modules: list[nn.Module] = []
        """The modules in these places and their containers."""
        self.add(places)

    def add(self, places: Iterable[Place]) -> None:
        """Note more places."""
        for held, name in places:
            noted = _MISSING_NOTED if name not in held else _noted(held[name], str(name), _DEPTH)
            if noted is not None:
                self._noted.append((held, name, noted))
                self.modules += noted.modules()

    def weights(self) -> list[Weight]:
        """Return the tensors whose contents were not noted: whoever runs the forward again must watch them."""
        return [weight for _, _, noted in self._noted for weight in noted.weights()]

    def settle(self) -> None:
        """Leave to the forward what it has changed itself, if that is large or has a graph."""
        self._noted = [
            (held, name, noted if noted.is_light or noted.is_untouched(held.get(name, _MISSING)) else _Left())
            for held, name, noted in self._noted
        ]

    def settle_function(self) -> None:
        """Do the same for a function's places, and leave counters and lists to it: it counts its calls in them."""
        self.settle()
        self._noted = [
            (held, name, noted) for held, name, noted in self._noted if not noted.is_counter(held.get(name, _MISSING))
        ]

    def are_unchanged(self) -> bool:
        """Return whether all places hold what they held. Of small tensors and generators, this is never known."""
        return all(noted.is_same(held.get(name, _MISSING)) for held, name, noted in self._noted)

    @contextlib.contextmanager
    def restored(self, region: str) -> Iterator[None]:
        """Put back inside what was there, and afterwards what is there now."""
        changed = [entry for entry in self._noted if not entry[2].is_same(entry[0].get(entry[1], _MISSING))]
        values = [(held, name, _value_of(noted, name, region)) for held, name, noted in changed]
        noted_states = [state for _, _, noted in changed for state in noted.states()]
        states = [state.now() for state in noted_states]
        with put_back_afterwards([(held, name) for held, name, _ in values]):
            try:
                for state in noted_states:
                    state.set()
                _put(values)
                yield
            finally:
                for state in states:
                    state.set()


@contextlib.contextmanager
def put_back_afterwards(places: list[Place]) -> Iterator[None]:
    """Put back what is in these places now, whatever is put into them inside."""
    now = [held.get(name, _MISSING) for held, name in places]
    try:
        yield
    finally:
        for (held, name), value in zip(places, now, strict=True):
            if value is not _MISSING:
                held[name] = value
            elif name in held:
                del held[name]


def _put(values: list[tuple[MutableMapping[Any, Any], Any, Any]]) -> None:
    for held, name, value in values:
        if value is _MISSING:
            held.pop(name, None)
        elif value is not _AS_IT_IS:
            held[name] = value


def _value_of(noted: _Noted, name: Any, region: str) -> Any:
    """Return what a place held, or refuse to run a forward again that cannot find it any more."""
    if name == "merged_adapters":  # which PEFT writes to the weights so that nobody can see it
        raise InPlaceError(
            f"{region}: adapters were merged into its weights, or taken out of them, between forward and backward. Do "
            "that after backward"
        )
    value = noted.value()
    if value is GONE:
        raise InPlaceError(
            f"{region}: {name!r} was replaced between forward and backward, and nobody holds any more what it was, so "
            "the forward cannot be run again with it. Replace it after backward, or keep the old one until then"
        )
    return value


_DEPTH = 2
"""How deeply nested containers are noted item by item."""
_AS_IT_IS = object()
"""Stands for a value that is left in its place."""


class _Noted:
    """What a place held."""

    is_light = True
    """Whether it may be kept until backward, even if the forward has put something else in its place."""

    def is_same(self, now: Any) -> bool:
        """Return whether a place that holds this now may be left as it is."""
        raise NotImplementedError

    def is_untouched(self, now: Any) -> bool:
        """Return whether a forward has left it alone, after which its place holds this."""
        return self.is_same(now)

    def is_counter(self, _now: Any) -> bool:
        """Return whether it is a number or a list that a forward has changed, after which its place holds this."""
        return False

    def value(self) -> Any:
        """Return what the place held, for a forward that may change it."""
        raise NotImplementedError

    def weights(self) -> Iterable[Weight]:
        return ()

    def states(self) -> Iterable[_WithState]:
        return ()

    def modules(self) -> Iterable[nn.Module]:
        return ()


def _noted(value: Any, name: str, depth: int) -> _Noted | None:  # noqa: PLR0911  (a table)
    """Note a value; None for one of a kind that is left alone."""
    if type(value) in PLAIN:
        return _Plain(value)
    if type(value) in CONTAINERS:
        if are_plain(items_of(value)):
            return _PlainContainer(value)
        return _Container(value, name, depth - 1) if depth else None
    if isinstance(value, torch.Tensor):
        if is_gathered(value):  # DeepSpeed keeps a list of them beside the module's own
            return None
        return _SmallTensor(value) if _is_small_state(value) else _LargeTensor(value, name)
    if type(value) in WITH_STATE:
        return _WithState(value)
    if type(value) is np.ndarray:
        return _SmallArray(value) if value.nbytes <= SMALL_BYTES else _Object(value)
    if isinstance(value, nn.Module):
        return _Part(value)
    return _Object(value) if isinstance(value, FUNCTIONS) else None


class _Plain(_Noted):
    def __init__(self, value: Any) -> None:
        self._value = value

    def is_same(self, now: Any) -> bool:
        return is_same_plain(now, self._value)

    def is_counter(self, now: Any) -> bool:
        return not self.is_same(now)

    def value(self) -> Any:
        return self._value


class _Missing(_Noted):
    def is_same(self, now: Any) -> bool:
        return now is _MISSING

    def value(self) -> Any:
        return _MISSING


_MISSING_NOTED = _Missing()


class _Left(_Noted):
    """Stands for what the forward changes itself: nothing is put there, but what is there now is put back."""

    def is_same(self, _now: Any) -> bool:
        return False

    def value(self) -> Any:
        return _AS_IT_IS


class _PlainContainer(_Noted):
    def __init__(self, value: Any) -> None:
        self._kept: Any = value if type(value) is tuple else value.copy()

    def is_same(self, now: Any) -> bool:
        kind = type(self._kept)
        return type(now) is kind and len(now) == len(self._kept) and are_plain(items_of(now)) and now == self._kept

    def is_counter(self, now: Any) -> bool:
        return not self.is_same(now)

    def value(self) -> Any:
        return self._kept if type(self._kept) is tuple else self._kept.copy()


class _Container(_Noted):
    """A container with tensors, modules, containers or objects. The objects are held weakly."""

    def __init__(self, value: Any, name: str, depth: int) -> None:
        self._frame = rebuilt(value, [None] * len(value))
        self._items = [_noted(item, name, depth) or _Object(item) for item in items_of(value)]
        self.is_light = all(item.is_light for item in self._items)

    def is_same(self, now: Any) -> bool:
        return self._holds(now) and all(
            item.is_same(other) for item, other in zip(self._items, items_of(now), strict=True)
        )

    def is_untouched(self, now: Any) -> bool:
        return self._holds(now) and all(
            item.is_light or item.is_untouched(other) for item, other in zip(self._items, items_of(now), strict=True)
        )

    def is_counter(self, now: Any) -> bool:
        return not self._holds(now) or any(
            item.is_counter(other) for item, other in zip(self._items, items_of(now), strict=True)
        )

    def _holds(self, now: Any) -> bool:
        frame = self._frame
        if type(now) is not type(frame) or len(now) != len(self._items):
            return False
        return not isinstance(frame, dict) or [*now] == [*frame]

    def value(self) -> Any:
        items = [item.value() for item in self._items]
        return GONE if any(item is GONE for item in items) else rebuilt(self._frame, items)

    def weights(self) -> Iterable[Weight]:
        return [weight for item in self._items for weight in item.weights()]

    def states(self) -> Iterable[_WithState]:
        return [state for item in self._items for state in item.states()]

    def modules(self) -> Iterable[nn.Module]:
        return [module for item in self._items for module in item.modules()]


class _SmallTensor(_Noted):
    """A tensor that is kept as a copy, whether or not anything changes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kept = tensor.clone()

    def is_same(self, _now: Any) -> bool:
        return False

    def value(self) -> Any:
        return self._kept.clone()


class _SmallArray(_Noted):
    """An array of NumPy's, which is kept as a copy."""

    def __init__(self, array: np.ndarray) -> None:
        self._kept = array.copy()

    def is_same(self, now: Any) -> bool:
        return type(now) is np.ndarray and now.dtype == self._kept.dtype and np.array_equal(now, self._kept)

    def value(self) -> Any:
        return self._kept.copy()


class _LargeTensor(_Noted):
    """A tensor that is held as it is, and watched: its contents must not have changed if it is used."""

    is_light = False

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._get = hold(tensor)
        self._id = id(tensor)
        self._weight = watched(name, tensor, "tensor")

    def is_same(self, now: Any) -> bool:
        return id(now) == self._id and now is self._get()

    def is_untouched(self, now: Any) -> bool:
        return self.is_same(now) and version_if_any(now) == self._weight.version

    def value(self) -> Any:
        return self._get()

    def weights(self) -> Iterable[Weight]:
        return (self._weight,)


class _WithState(_Noted):
    """A random generator, which goes on from where it was."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._state = _state_of(holder)

    def is_same(self, _now: Any) -> bool:
        return False

    def is_untouched(self, now: Any) -> bool:
        return now is self._holder

    def value(self) -> Any:
        return self._holder

    def states(self) -> Iterable[_WithState]:
        return (self,)

    def now(self) -> _WithState:
        return _WithState(self._holder)

    def set(self) -> None:
        """Give it this state again."""
        if isinstance(self._holder, np.random.Generator):
            self._holder.bit_generator.state = self._state
        elif isinstance(self._holder, random.Random):
            self._holder.setstate(self._state)
        else:
            self._holder.set_state(self._state)


def _state_of(holder: Any) -> Any:
    if isinstance(holder, np.random.Generator):
        return holder.bit_generator.state
    return holder.getstate() if isinstance(holder, random.Random) else holder.get_state()


class _Object(_Noted):
    """A function, or an object of which nothing is known but which one it is."""

    is_light = False

    def __init__(self, value: Any) -> None:
        self._get = hold(value)

    def is_same(self, now: Any) -> bool:
        held = self._get()
        return held is now or (isinstance(now, types.MethodType) and bool(held == now))

    def value(self) -> Any:
        return self._get()


class _Part(_Noted):
    """A module that is no part by its registration."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def is_same(self, now: Any) -> bool:
        return now is self._module

    def value(self) -> Any:
        return self._module

    def modules(self) -> Iterable[nn.Module]:
        return (self._module,)


def _is_small_state(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    return tensor.nbytes <= SMALL_BYTES and not is_functorch_wrapped(tensor)
