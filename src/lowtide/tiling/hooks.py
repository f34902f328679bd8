"""Knows the hooks inside a tiled module, and which of them have a say in what it computes.

A hook of a part sees one tile at a time, so a trial must run those that change something: an output, an argument, a
weight. It must not run those that only look, for they would note down the trial's tokens as well. Torch does not tell
one kind from the other. Those of a few packages are known; the others are watched as they act in a real call.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lowtide._torch import hooks_of, version_of
from lowtide.tensor_tree import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GATHERING = ("torch.distributed.fsdp", "torch.distributed._composable", "deepspeed")
"""Whose hooks gather weights, which the trial has gathered already."""
_OBSERVING = ("transformers.utils.output_capturing",)
_CHANGING = ("torch.distributed.tensor", "torch.nn.utils", "transformers.distributed")
"""Whose hooks a part cannot do without: tensor parallelism, and weights that are computed before each call."""

_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Hook(NamedTuple):
    """A forward hook, or one before forward, of a part of a module."""

    path: str
    module: nn.Module
    held_by: dict[int, Any]
    key: int
    function: Callable[..., Any]

    def __str__(self) -> str:
        function = _inner_function(self.function)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return f"{name.rpartition('<locals>.')[2]} on {self.path!r}"

    @property
    def kind(self) -> tuple[str, object]:
        """Its place and its code: hooks that are made anew for each call are of one kind."""
        function = _inner_function(self.function)
        return self.path, getattr(function, "__code__", type(function))

    def is_of(self, packages: tuple[str, ...]) -> bool:
        function = _inner_function(self.function)
        origin = getattr(function, "__module__", None) or type(function).__module__
        return any(f"{origin}.".startswith(f"{package}.") for package in packages)


def inner_hooks(module: nn.Module | None) -> list[Hook]:
    """Return the forward hooks of a module's parts, but for those that gather weights or are known to look only.

    The module's own hooks see its whole call: tiles are inside them.
    """
    parts = [] if module is None else list(module.named_modules())[1:]
    found = [
        Hook(path, part, hooks, key, function)
        for path, part in parts
        for kind, hooks in hooks_of(part).items()
        if "forward" in kind
        for key, function in hooks.items()
    ]
    return [hook for hook in found if not hook.is_of(_GATHERING + _OBSERVING)]


def known_to_change(hooks: list[Hook]) -> list[Hook]:
    return [hook for hook in hooks if hook.is_of(_CHANGING)]


def _inner_function(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


# --- Watching -------------------------------------------------------------------------------------------------------


class HookWatch:
    """Notes which of some hooks change anything while it is in force."""

    def __init__(self, hooks: list[Hook]) -> None:
        self._watched = [_WatchedHook(hook) for hook in hooks]

    @property
    def changing(self) -> list[Hook]:
        return [watched.hook for watched in self._watched if watched.has_changed]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the hooks inside. A hook that takes itself away meanwhile stays away."""
        for watched in self._watched:
            watched.hook.held_by[watched.hook.key] = watched
        try:
            yield
        finally:
            for watched in self._watched:
                if watched.hook.held_by.get(watched.hook.key) is watched:
                    watched.hook.held_by[watched.hook.key] = watched.hook.function


class _WatchedHook:
    """Calls a hook, and notes whether it changed what it was given or its module."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.watched_function = hook.function
        self.has_changed = False

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        before = _Reachable(module, given)
        result = self.hook.function(module, *given)
        is_new = result is not None and not any(result is value for value in given)
        self.has_changed |= is_new or _Reachable(module, given).marks != before.marks
        return result


class _Reachable:
    """What a hook can change: its arguments, and what its module holds, as identities, versions and sums.

    All of it is kept alive meanwhile: the identity of a thing that is gone may be another's.
    """

    def __init__(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        own = vars(module)
        places = [(name, None, value) for name, value in own.items() if not isinstance(value, dict)]
        places += [
            (name, key, value) for name, inner in own.items() if isinstance(inner, dict) for key, value in inner.items()
        ]
        places += [("", key, value) for inner in given if isinstance(inner, dict) for key, value in inner.items()]
        tensors = [*flatten(given)[0], *flatten(list(own.values()))[0]]
        self._kept = (places, tensors)
        self.marks = [
            [(name, key, id(value)) for name, key, value in places],
            [(id(tensor), _mark(tensor)) for tensor in tensors],
        ]


def _mark(tensor: torch.Tensor) -> tuple[int, str]:
    """Return a number and a word that change with a tensor's content, also if it is written through `.data`."""
    version = 0 if tensor.is_inference() else version_of(tensor)
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and tensor.dtype in _SUMMED
    return version, str(tensor.detach().sum(dtype=torch.float64).item()) if is_plain else ""
