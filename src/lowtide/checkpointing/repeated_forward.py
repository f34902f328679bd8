"""Lets a module's forward be run again in backward as if nothing had happened in between.

When it first runs, it is noted what the module computes with: its weights, its buffers, the numbers in its attributes,
which of its parts are in training mode, and their hooks. When it runs again, it finds the same, or is refused;
afterwards the module is as it was.

What a forward changes unseen is another matter: buffers and weights through `.data`, tensors and lists in attributes,
Python's and NumPy's random numbers. So the first calls of a module are looked at closely (`Habits`): what such a call
changes is put back from then on, and a changed weight is refused. `lowtide.checkpoint` remembers what it has seen of a
module for as long as the module lives.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import buffers_of, no_dispatch_modes
from lowtide.attributes import NO_ATTRIBUTES, AttributeHabits, AttributeLook
from lowtide.buffers import Snapshot
from lowtide.checkpointing.noted_hooks import NotedHooks
from lowtide.errors import InPlaceError
from lowtide.randomness import HostRandomState
from lowtide.weights import (
    Weight,
    are_as_noted,
    as_in_forward,
    check_unchanged,
    parts_of,
    weights_in,
    without_moved,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LOOKS = 2
"""How many calls of a region are looked at closely."""


class Habits:
    """What the forward of one region changes behind autograd's back, as far as its first calls have shown."""

    def __init__(self) -> None:
        self.looks_left = LOOKS
        self.buffers: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.attributes = AttributeHabits()
        self.draws_on_host = False
        """Whether it draws from Python's or NumPy's generator."""

    def writes_unseen(self, module: nn.Module, name: str, _buffer: torch.Tensor) -> bool:
        """Return whether the forward was found to write to a buffer without autograd's knowledge."""
        return name in self.buffers.get(module, ())


def repeated_forward(
    function: Callable[..., Any], module: nn.Module | None, arguments: Iterable[Any], name: str, habits: Habits | None
) -> Callable[..., Any]:
    """Wrap `function` so that it can be run again; a function that is not known to use a module is returned as it is.

    The module is `module`, `function` itself, or the object that it is a bound method of. Modules among the arguments
    are used, too.
    """
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    owner = module if module is not None else owner
    modules = [used for used in (owner, *arguments) if isinstance(used, nn.Module)]
    if not modules:
        return function
    if habits is None:
        habits = _habits.get(modules[0]) or _habits.setdefault(modules[0], Habits())
    return RepeatedForward(function, modules, name, habits)


_habits: weakref.WeakKeyDictionary[nn.Module, Habits] = weakref.WeakKeyDictionary()
"""What is known about modules that no policy acts on. An entry dies with its module."""


def buffers_behind(function: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """Yield the buffers that a function of `repeated_forward` puts back; none for any other function."""
    if isinstance(function, RepeatedForward):
        for module in function.modules:
            yield from module.buffers()


class RepeatedForward:
    """A function of modules, mostly the forward of one, which checkpoint runs in forward and again in backward."""

    def __init__(self, function: Callable[..., Any], modules: list[nn.Module], name: str, habits: Habits) -> None:
        self._function = function
        self.modules = modules
        self._name = f"region {name!r}"
        self._habits = habits
        self._weights: list[Weight] | None = None
        self._hooks: NotedHooks | None = None
        self._attributes = NO_ATTRIBUTES
        self._before: Snapshot | None = None
        """The buffers before the first run, as long as that lasts."""
        self._buffers: Snapshot | None = None
        self._random: HostRandomState | None = None
        self._look: _Look | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._weights is None:
            return self._run_first(args, kwargs)
        are_weights_as_noted = are_as_noted(self._weights)
        if self._look is not None:  # the first run itself asks for a gradient, and with it for a second run
            self._learn(self._look)
        buffers = self._buffers if self._before is None else self._before.noted(self._habits.writes_unseen)
        are_hooks_as_noted = self._hooks is None or self._hooks.are_unchanged()
        are_objects_as_noted = are_weights_as_noted and are_hooks_as_noted
        if are_objects_as_noted and buffers is None and self._random is None and self._attributes.are_unchanged():
            return self._function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if not are_weights_as_noted:
                check_unchanged(self._weights, self._name)
                stack.enter_context(as_in_forward(self._weights))
            if self._hooks is not None and not are_hooks_as_noted:
                stack.enter_context(self._hooks.restored())
            if buffers is not None:
                stack.enter_context(buffers.restored(self._name))
            stack.enter_context(self._attributes.restored())
            if self._random is not None:
                stack.enter_context(self._random.restored())
            return self._function(*args, **kwargs)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts, habits = parts_of(*self.modules), self._habits
        self._weights = weights_in(parts, skip_first=self._is_forward)
        self._before = Snapshot(parts) if any(map(buffers_of, parts)) else None
        self._hooks = NotedHooks(parts[self._is_forward :])  # the function runs inside the hooks of its own module
        self._attributes = habits.attributes.note(parts)
        self._random = HostRandomState() if habits.looks_left or habits.draws_on_host else None
        self._look = _Look(parts, self._weights) if habits.looks_left else None
        result = self._function(*args, **kwargs)
        if self._look is not None:
            self._finish(self._look)
        if self._before is not None:
            self._buffers, self._before = self._before.noted(habits.writes_unseen), None
        self._weights = without_moved(self._weights)
        return result

    @property
    def _is_forward(self) -> bool:
        """Whether the function is called inside the hooks of its first module."""
        return self._function is not self.modules[0] and not isinstance(self._function, types.FunctionType)

    def _learn(self, look: _Look) -> None:
        """Add to the habits what the first run has changed so far."""
        with no_dispatch_modes():
            look.attributes.learn(self._habits.attributes, self._attributes)
            for part, name in () if self._before is None else self._before.unseen_changes():
                self._habits.buffers.setdefault(part, set()).add(name)

    def _finish(self, look: _Look) -> None:
        """End a close look, when the first run is over."""
        self._look = None
        self._habits.looks_left -= 1
        with no_dispatch_modes():
            look.check_weights(self._name)
        self._learn(look)
        self._habits.draws_on_host |= self._random != HostRandomState()
        self._random = self._random if self._habits.draws_on_host else None


class _Look:
    """A close look at one call: attributes and the sums of weights, before and after."""

    def __init__(self, parts: list[nn.Module], weights: list[Weight]) -> None:
        self._weights = [weight for weight in weights if weight.storage is not None and not weight.tensor.is_meta]
        with no_dispatch_modes():  # this is not the program's own work
            self.attributes = AttributeLook(parts)
            self._sums = [_sum(weight.tensor) for weight in self._weights]

    def check_weights(self, region: str) -> None:
        """Refuse a forward that changed the contents of a weight."""
        for weight, total, now in zip(self._weights, self._sums, without_moved(self._weights), strict=True):
            if now.storage is not None and not torch.equal(_sum(weight.tensor), total):
                raise InPlaceError(
                    f"{region}: its forward changes the weight {weight.name!r} of shape {tuple(weight.tensor.shape)}, "
                    "and a recompute would change it a second time. Change it outside of forward, for example after "
                    "optimizer.step(), register it as a buffer, or leave the region out with a rule ('NAME: none')"
                )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number that tells a changed weight from an unchanged one."""
    precise = torch.float32 if tensor.device.type == "mps" else torch.float64  # Apple's GPUs have no other
    with torch.no_grad():
        total = tensor.sum(dtype=precise if tensor.is_floating_point() else None)
        return total.nan_to_num() if total.is_floating_point() else total
