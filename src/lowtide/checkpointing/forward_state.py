"""Lets a forward be run again in backward as if nothing had happened in between.

When it first runs, it is noted what it computes with: modules with their parts, weights, buffers, attributes, modes and
hooks; and, of a function, what its closure refers to. When it runs again, it finds the same, or is refused; afterwards
everything is as it was.

What a forward changes unseen is another matter: weights and large buffers through `.data`, Python's and NumPy's random
numbers. So some calls are looked at closely, the first, the second, the fourth and so on (`Habits`): what such a call
changes is put back from then on, and a changed weight is refused. `lowtide.checkpoint` remembers what it has seen of a
module, or of a function's code, for as long as that lives.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import have_buffers, no_dispatch_modes, parts_of, uncompiled
from lowtide.attributes import NO_ATTRIBUTES, AttributeHabits
from lowtide.buffers import Snapshot
from lowtide.checkpointing.rewrites import Rewrites
from lowtide.closures import KNOWN_INPUTS, reached_by
from lowtide.errors import InPlaceError
from lowtide.noted_hooks import NotedHooks
from lowtide.noted_places import NotedPlaces
from lowtide.randomness import HostRandomState
from lowtide.weights import (
    Weight,
    are_as_noted,
    as_in_forward,
    watched,
    weights_in,
    without_moved,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowtide.closures import Place
    from lowtide.weights import RefuseSaved


class Habits:
    """What the forward of one region changes behind autograd's back, as far as close looks have shown."""

    def __init__(self) -> None:
        self._calls = 0
        self.buffers: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.attributes = AttributeHabits()
        self.rewrites = Rewrites()
        self.draws_on_host = False
        """Whether it draws from Python's or NumPy's generator."""

    def next_is_looked_at(self) -> bool:
        """Count one more call, and return whether to look at it closely: at the first, second, fourth, eighth ..."""
        self._calls += 1
        return self._calls & (self._calls - 1) == 0

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
    """Return the state that a call of `function` computes with; None for one that is not known to have any.

    The module is `module`, `function` itself, or the object that it is a bound method of. Modules among the arguments
    are used, too, and what a function's closure refers to (`closures`).
    """
    function = uncompiled(function)
    if module is None:
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        module = owner if isinstance(owner, nn.Module) else None
    others = [value for value in (*args, *kwargs.values()) if type(value) not in KNOWN_INPUTS]
    modules: list[nn.Module] = [] if module is None else [module]
    places: list[Place] = []
    if others or module is None:
        reached = reached_by(function if module is None else None, others)
        modules, places = [*dict.fromkeys((*modules, *reached.modules))], reached.places
    if not modules and not places:
        return None
    if habits is None:
        key = modules[0] if modules else getattr(function, "__code__", None)
        habits = Habits() if key is None else _habits.get(key) or _habits.setdefault(key, Habits())
    is_forward = module is not None and function is not module and not isinstance(function, types.FunctionType)
    return ForwardState(modules, name, habits, is_forward=is_forward, places=places)


_habits: weakref.WeakKeyDictionary[Any, Habits] = weakref.WeakKeyDictionary()
"""What is known about modules that no policy acts on, and about functions. An entry dies with its module."""


class ForwardState:
    """What modules compute with in one call of a region: noted as its forward begins, found again as it is repeated.

    Its life: `note` and `settle` around the forward; in backward `is_as_noted`, and if it is not, `restored`.
    """

    _weights: list[Weight] = []  # noqa: RUF012  (never changed, but replaced)
    _hooks: NotedHooks | None = None
    _attributes = NO_ATTRIBUTES
    _outside: NotedPlaces | None = None
    """What a function's closure refers to."""
    _before: Snapshot | None = None
    """The buffers before the forward, as long as that lasts."""
    _buffers: Snapshot | None = None
    _watched: list[Weight] = []  # noqa: RUF012  (never changed, but replaced)
    """Tensors that are no weights, and must not change either."""
    _random: HostRandomState | None = None
    _look: _Look | None = None

    def __init__(
        self,
        modules: list[nn.Module],
        name: str,
        habits: Habits,
        *,
        is_forward: bool,
        places: list[Place] | None = None,
    ) -> None:
        self.modules = modules
        self._region = name
        self._habits = habits
        self._is_forward = is_forward
        """Whether the region is called inside the hooks of its first module."""
        self._places = places

    def note(self) -> None:
        """Note everything, before the forward."""
        parts, habits, is_forward = parts_of(self.modules), self._habits, self._is_forward
        self._hooks = NotedHooks(parts[1:] if is_forward else parts)
        known = len(parts)
        parts, self._attributes = habits.attributes.note(
            parts, len(self.modules), skip_forward=is_forward, have_hooks=bool(self._hooks)
        )
        if len(parts) != known:
            self._hooks = NotedHooks(parts[1:] if is_forward else parts)
        self._weights = weights_in(parts, skip_first=is_forward)
        if habits.rewrites:
            self._weights = habits.rewrites.noted(self._weights)
        if have_buffers(parts):
            self._before = Snapshot(parts)
        if self._places:
            self._outside = NotedPlaces(self._places)
        is_looked_at = habits.next_is_looked_at()
        if is_looked_at or habits.draws_on_host:
            self._random = HostRandomState()
        if is_looked_at:
            self._look = _Look(self._weights)

    def settle(self) -> None:
        """Note what the forward has changed, after it."""
        if self._look is not None:
            self._finish(self._look)
        if self._before is not None:
            self._buffers, self._before = self._before.noted(self._habits.writes_unseen), None
            self._watched = _watched_buffers(self._buffers)
        if rewrites := self._habits.rewrites:
            rewrites.count(rewrites.expected(self._weights))
        self._weights = without_moved(self._weights)
        if self._attributes.places is not None:
            self._attributes.places.settle()
            self._watched = [*self._watched, *self._attributes.places.weights()]
        if self._outside is not None:
            self._outside.settle_function()
            self._watched = [*self._watched, *self._outside.weights()]

    def is_as_noted(self) -> bool:
        """Return whether the modules hold what was noted, and a second forward changes nothing that must be kept."""
        if self._look is not None:  # the forward itself asks for a gradient, and with it for a second forward
            self._learn()
        if self._before is not None or self._buffers is not None or self._random is not None or self._habits.rewrites:
            return False
        if self._outside is not None and not self._outside.are_unchanged():
            return False
        if self._watched and not are_as_noted(self._watched):
            return False
        are_hooks_as_noted = self._hooks is None or self._hooks.are_unchanged()
        return are_hooks_as_noted and are_as_noted(self._weights) and self._attributes.are_unchanged()

    @contextlib.contextmanager
    def restored(self, *, sees_saved: bool) -> Iterator[RefuseSaved | None]:
        """Let the modules find inside what was noted, or refuse to; afterwards they are as they are now.

        If tensors have changed, it hands out a function that must be called for each tensor that is saved inside;
        `sees_saved` says whether the caller can.
        """
        buffers = self._buffers if self._before is None else self._before.noted(self._habits.writes_unseen)
        watched_now = self._watched if self._before is None else _watched_buffers(buffers)
        refuse_saved = None
        with contextlib.ExitStack() as stack:
            weights = self._weights
            if rewrites := self._habits.rewrites:
                weights = rewrites.expected(weights)
                stack.enter_context(rewrites.counted(weights))
            weights = [*weights, *watched_now]
            if not are_as_noted(weights):
                refuse_saved = stack.enter_context(as_in_forward(weights, self._name, sees_saved=sees_saved))
            if self._outside is not None:
                stack.enter_context(self._outside.restored(self._name))
            stack.enter_context(self._attributes.restored(self._name))
            if self._hooks is not None and not self._hooks.are_unchanged():
                stack.enter_context(self._hooks.restored(self._name))
            if buffers is not None:
                stack.enter_context(buffers.restored())
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

    def _learn(self) -> None:
        """Add to the habits what the forward has changed so far."""
        with no_dispatch_modes():
            for part, name in () if self._before is None else self._before.unseen_changes():
                self._habits.buffers.setdefault(part, set()).add(name)

    def _finish(self, look: _Look) -> None:
        """End a close look, when the forward is over."""
        self._look = None
        self._attributes.settle()
        with no_dispatch_modes():
            look.check_weights(self._name)
        self._habits.rewrites.learn(self._weights)
        self._learn()
        self._habits.draws_on_host |= self._random != HostRandomState()
        self._random = self._random if self._habits.draws_on_host else None


def _watched_buffers(buffers: Snapshot | None) -> list[Weight]:
    found = () if buffers is None else buffers.watched()
    return [watched(name, buffer, "buffer") for name, buffer in found]


class _Look:
    """A close look at one call: the sums of weights, before and after."""

    def __init__(self, weights: list[Weight]) -> None:
        self._weights = [weight for weight in weights if weight.storage is not None and not weight.tensor.is_meta]
        with no_dispatch_modes():  # this is not the program's own work
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
