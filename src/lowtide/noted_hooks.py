"""Notes the forward hooks of a module's parts: a hook that is added or removed before backward changes no recompute.

What is noted lives as long as the graph, and a hook may hold tensors of that graph: then neither would ever be freed.
So hooks are held weakly, but for plain functions that hold nothing. A removed hook that nobody else holds is gone.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import TYPE_CHECKING, Any

from lowtide._torch import forward_hooks_of, have_forward_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


class NotedHooks:
    """The hooks of some parts as they were when a forward began."""

    __slots__ = ("_hooks", "_parts")

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parts = parts
        self._hooks: list[dict[int, Callable[[], Any]]] | None = None
        """For each dictionary of hooks, how to get at those that it had; None if there were none at all."""
        if have_forward_hooks(parts):
            self._hooks = [{key: _held(hook) for key, hook in place.items()} for place in self._places()]

    def are_unchanged(self) -> bool:
        """Return whether the parts have the same hooks. Each hook has a number that no other gets."""
        if self._hooks is None:
            return not have_forward_hooks(self._parts)
        return [*map(tuple, self._places())] == [*map(tuple, self._hooks)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the parts have the hooks that were noted inside, and afterwards those that they have now."""
        now = [(place, dict(place)) for place in self._places()]
        try:
            for (place, hooks), noted in zip(now, self._hooks or [{} for _ in now], strict=True):
                found = {key: hooks.get(key, held()) for key, held in noted.items()}
                _fill(place, {key: hook for key, hook in found.items() if hook is not None})
            yield
        finally:
            for place, hooks in now:
                _fill(place, hooks)

    def _places(self) -> list[dict[int, Any]]:
        return [place for part in self._parts for place in forward_hooks_of(part)]


def _held(hook: Any) -> Callable[[], Any]:
    """Return a function that returns the hook, as long as it may or can be had."""
    if isinstance(hook, bool) or (isinstance(hook, types.FunctionType) and not hook.__closure__):
        return lambda: hook
    try:
        return weakref.WeakMethod(hook) if isinstance(hook, types.MethodType) else weakref.ref(hook)
    except TypeError:  # an object that cannot be referred to weakly
        return lambda: None


def _fill(place: dict[int, Any], hooks: dict[int, Any]) -> None:
    place.clear()
    place.update(hooks)
