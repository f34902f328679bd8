"""Lets a module's forward be run again in backward as if nothing had happened in between.

When it first runs, it is noted what the module computes with: its weights, its buffers, and which of its parts are in
training mode. When it runs again, it finds the same, or is refused; afterwards the module is as it was.

What a forward changes unseen is another matter: buffers and frozen weights through `.data`, counters in plain
attributes. A policy looks at the first calls of a region closely (`Habits`): such buffers and counters are put back
from then on, and such weights are refused. Without a policy, `lowtide.checkpoint` puts back all small buffers.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import buffers_of, no_dispatch_modes
from lowtide.buffers import SMALL_BYTES, Snapshot
from lowtide.errors import InPlaceError
from lowtide.weights import Weight, are_as_noted, as_in_forward, check_unchanged, parts_of, weights_in, without_moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOOKS = 2
"""How many calls of a region are looked at closely."""

_COUNTER = (bool, int, float, complex, str, type(None))


class Habits:
    """What the forward of one region changes behind autograd's back, as far as its first calls have shown."""

    def __init__(self) -> None:
        self.looks_left = LOOKS
        self.buffers: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.attributes: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()

    def writes_unseen(self, module: nn.Module, name: str, _buffer: torch.Tensor) -> bool:
        """Return whether the forward was found to write to a buffer without autograd's knowledge."""
        return name in self.buffers.get(module, ())


def repeated_forward(
    function: Callable[..., Any], module: nn.Module | None, name: str, habits: Habits | None
) -> Callable[..., Any]:
    """Wrap `function` so that it can be run again; a function without a module is returned as it is.

    The module is `module`, `function` itself, or the object that it is a bound method of.
    """
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    owner = module if module is not None else owner
    return RepeatedForward(function, owner, name, habits) if isinstance(owner, nn.Module) else function


class RepeatedForward:
    """A module's forward, which checkpoint runs once in forward and again in backward."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, name: str, habits: Habits | None) -> None:
        self._function = function
        self._module = module
        self._name = f"region {name!r}"
        self._habits = habits
        self._weights: list[Weight] | None = None
        self._modes: list[tuple[nn.Module, bool]] = []
        self._buffers: Snapshot | None = None
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._weights is None:
            return self._run_first(args, kwargs)
        are_weights_as_noted = are_as_noted(self._weights)
        flipped = [(part, mode) for part, mode in self._modes if part.training is not mode]
        if are_weights_as_noted and not flipped and self._buffers is None and not self._attributes:
            return self._function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if not are_weights_as_noted:
                check_unchanged(self._weights, self._name)
                stack.enter_context(as_in_forward(self._weights))
            stack.enter_context(_modes_set(flipped))
            if self._buffers is not None:
                stack.enter_context(self._buffers.restored(self._name))
            stack.enter_context(_attributes_set(self._attributes))
            return self._function(*args, **kwargs)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = parts_of(self._module)
        weights = weights_in(parts, skip_first=self._function is not self._module)
        self._modes = [(part, part.training) for part in parts]
        before = Snapshot(self._module) if any(map(buffers_of, parts)) else None
        habits = self._habits
        if habits is None:
            result = self._function(*args, **kwargs)
        elif habits.looks_left:
            habits.looks_left -= 1
            look = _Look(parts, weights)
            result = self._function(*args, **kwargs)
            look.learn(habits, before, self._name)
            self._attributes = look.known_attributes(habits)
        else:
            if habits.attributes:
                self._attributes = [(part, _read(part, names)) for part, names in habits.attributes.items()]
            result = self._function(*args, **kwargs)
        if before is not None:
            self._buffers = before.noted(_is_small if habits is None else habits.writes_unseen)
        self._weights = without_moved(weights)
        return result


def _is_small(_module: nn.Module, _name: str, buffer: torch.Tensor) -> bool:
    return buffer.nbytes <= SMALL_BYTES


class _Look:
    """A close look at one call: counters in attributes, and the sums of weights, before and after."""

    def __init__(self, parts: list[nn.Module], weights: list[Weight]) -> None:
        self._counters = [(part, _counters(part)) for part in parts]
        self._weights = [weight for weight in weights if weight.storage is not None and not weight.tensor.is_meta]
        self._sums = [_sum(weight.tensor) for weight in self._weights]

    def learn(self, habits: Habits, before: Snapshot | None, region: str) -> None:
        """Add what the call changed to the habits; refuse if it changed the contents of a weight."""
        for weight, total, now in zip(self._weights, self._sums, without_moved(self._weights), strict=True):
            if now.storage is not None and not torch.equal(_sum(weight.tensor), total):
                raise InPlaceError(
                    f"{region}: its forward changes the weight {weight.name!r} of shape {tuple(weight.tensor.shape)}, "
                    "and a recompute would change it a second time. Change it outside of forward, for example after "
                    "optimizer.step(), register it as a buffer, or leave the region out with a rule ('NAME: none')"
                )
        for part, name_of_buffer in () if before is None else before.unseen_changes():
            habits.buffers.setdefault(part, set()).add(name_of_buffer)
        for part, counters in self._counters:
            after = _counters(part)
            changed = {name for name in after if after[name] != counters.get(name, _MISSING)}
            if changed := changed | (counters.keys() - vars(part).keys()):
                habits.attributes.setdefault(part, set()).update(changed)

    def known_attributes(self, habits: Habits) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Return what the attributes that a forward changes held before it."""
        before = dict(self._counters)
        return [
            (part, {name: before[part].get(name, _MISSING) for name in names})
            for part, names in habits.attributes.items()
            if part in before
        ]


_MISSING = object()


def _counters(part: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that hold a number, a word or nothing; its mode is not one of them."""
    return {name: value for name, value in vars(part).items() if type(value) in _COUNTER and name != "training"}


def _read(part: nn.Module, names: set[str]) -> dict[str, Any]:
    return {name: vars(part).get(name, _MISSING) for name in names}


def _write(part: nn.Module, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _MISSING:
            vars(part).pop(name, None)
        else:
            vars(part)[name] = value


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number that tells a changed weight from an unchanged one."""
    precise = torch.float32 if tensor.device.type == "mps" else torch.float64  # Apple's GPUs have no other
    with torch.no_grad(), no_dispatch_modes():
        total = tensor.sum(dtype=precise if tensor.is_floating_point() else None)
        return total.nan_to_num() if total.is_floating_point() else total


@contextlib.contextmanager
def _modes_set(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set parts of a module to these modes inside, training or evaluation, which they are not in now."""
    try:
        for part, mode in modes:
            part.training = mode
        yield
    finally:
        for part, mode in modes:
            part.training = not mode


@contextlib.contextmanager
def _attributes_set(attributes: list[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    """Set plain attributes of modules inside, and what was there back afterwards."""
    now = [(part, _read(part, set(values))) for part, values in attributes]
    try:
        for part, values in attributes:
            _write(part, values)
        yield
    finally:
        for part, values in now:
            _write(part, values)
