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

from lowtide._torch import have_buffers, no_dispatch_modes, parts_of, uncompiled
from lowtide.attributes import NO_ATTRIBUTES, AttributeHabits, AttributeLook
from lowtide.buffers import Snapshot
from lowtide.checkpointing.rewrites import Rewrites
from lowtide.errors import InPlaceError
from lowtide.noted_hooks import NotedHooks
from lowtide.randomness import HostRandomState
from lowtide.weights import (
    Weight,
    are_as_noted,
    as_in_forward,
    weights_in,
    without_moved,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowtide.weights import RefuseSaved

LOOKS = 2
"""How many calls of a region are looked at closely."""


class Habits:
    """What the forward of one region changes behind autograd's back, as far as its first calls have shown."""

    def __init__(self) -> None:
        self.looks_left = LOOKS
        self.buffers: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.attributes = AttributeHabits()
        self.rewrites = Rewrites()
        self.draws_on_host = False
        """Whether it draws from Python's or NumPy's generator."""

    def writes_unseen(self, module: nn.Module, name: str, _buffer: torch.Tensor) -> bool:
        """Return whether the forward was found to write to a buffer without autograd's knowledge."""
        return name in self.buffers.get(module, ())


def state_of(
    function: Callable[..., Any],
    module: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    habits: Habits | None,
) -> ForwardState | None:
    """Return the state that a call of `function` computes with; None for one that is not known to use a module.

    The module is `module`, `function` itself, or the object that it is a bound method of. Modules among the arguments
    are used, too.
    """
    function = uncompiled(function)
    if module is None:
        module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    modules = [used for used in (module, *args, *kwargs.values()) if isinstance(used, nn.Module)]
    if not modules:
        return None
    if habits is None:
        habits = _habits.get(modules[0]) or _habits.setdefault(modules[0], Habits())
    is_forward = function is not modules[0] and not isinstance(function, types.FunctionType)
    return ForwardState(modules, name, habits, is_forward=is_forward)


_habits: weakref.WeakKeyDictionary[nn.Module, Habits] = weakref.WeakKeyDictionary()
"""What is known about modules that no policy acts on. An entry dies with its module."""


class ForwardState:
    """What modules compute with in one call of a region: noted as its forward begins, found again as it is repeated.

    Its life: `note` and `settle` around the forward; in backward `is_as_noted`, and if it is not, `restored`.
    """

    _weights: list[Weight] = []  # noqa: RUF012  (never changed, but replaced)
    _hooks: NotedHooks | None = None
    _attributes = NO_ATTRIBUTES
    _before: Snapshot | None = None
    """The buffers before the forward, as long as that lasts."""
    _buffers: Snapshot | None = None
    _random: HostRandomState | None = None
    _look: _Look | None = None

    def __init__(self, modules: list[nn.Module], name: str, habits: Habits, *, is_forward: bool) -> None:
        self.modules = modules
        self._region = name
        self._habits = habits
        self._is_forward = is_forward
        """Whether the region is called inside the hooks of its first module."""

    def note(self) -> None:
        """Note everything, before the forward."""
        parts, habits, is_forward = parts_of(self.modules), self._habits, self._is_forward
        self._weights = weights_in(parts, skip_first=is_forward)
        if habits.rewrites:
            self._weights = habits.rewrites.noted(self._weights)
        if have_buffers(parts):
            self._before = Snapshot(parts)
        self._hooks = NotedHooks(parts[1:] if is_forward else parts)
        self._attributes = habits.attributes.note(parts)
        if habits.looks_left or habits.draws_on_host:
            self._random = HostRandomState()
        if habits.looks_left:
            self._look = _Look(parts, self._weights)

    def settle(self) -> None:
        """Note what the forward has changed, after it."""
        if self._look is not None:
            self._finish(self._look)
        if self._before is not None:
            self._buffers, self._before = self._before.noted(self._habits.writes_unseen), None
        if rewrites := self._habits.rewrites:
            rewrites.count(rewrites.expected(self._weights))
        self._weights = without_moved(self._weights)

    def is_as_noted(self) -> bool:
        """Return whether the modules hold what was noted, and a second forward changes nothing that must be kept."""
        if self._look is not None:  # the forward itself asks for a gradient, and with it for a second forward
            self._learn(self._look)
        if self._before is not None or self._buffers is not None or self._random is not None or self._habits.rewrites:
            return False
        are_hooks_as_noted = self._hooks is None or self._hooks.are_unchanged()
        return are_hooks_as_noted and are_as_noted(self._weights) and self._attributes.are_unchanged()

    @contextlib.contextmanager
    def restored(self, *, sees_saved: bool) -> Iterator[RefuseSaved | None]:
        """Let the modules find inside what was noted, or refuse to; afterwards they are as they are now.

        If weights have changed, it hands out a function that must be called for each tensor that is saved inside;
        `sees_saved` says whether the caller can.
        """
        refuse_saved = None
        buffers = self._buffers if self._before is None else self._before.noted(self._habits.writes_unseen)
        with contextlib.ExitStack() as stack:
            weights = self._weights
            if rewrites := self._habits.rewrites:
                weights = rewrites.expected(weights)
                stack.enter_context(rewrites.counted(weights))
            if not are_as_noted(weights):
                refuse_saved = stack.enter_context(as_in_forward(weights, self._name, sees_saved=sees_saved))
            if self._hooks is not None and not self._hooks.are_unchanged():
                stack.enter_context(self._hooks.restored())
            if buffers is not None:
                stack.enter_context(buffers.restored(self._name))
            stack.enter_context(self._attributes.restored())
            if self._random is not None:
                stack.enter_context(self._random.restored())
            yield refuse_saved

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers of the modules."""
        for module in self.modules:
            yield from module.buffers()

    @property
    def _name(self) -> str:
        return f"region {self._region!r}"

    def _learn(self, look: _Look) -> None:
        """Add to the habits what the forward has changed so far."""
        with no_dispatch_modes():
            look.attributes.learn(self._habits.attributes, self._attributes)
            for part, name in () if self._before is None else self._before.unseen_changes():
                self._habits.buffers.setdefault(part, set()).add(name)

    def _finish(self, look: _Look) -> None:
        """End a close look, when the forward is over."""
        self._look = None
        self._habits.looks_left -= 1
        with no_dispatch_modes():
            look.check_weights(self._name)
        self._habits.rewrites.learn(self._weights)
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
