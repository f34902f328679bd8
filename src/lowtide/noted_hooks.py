"""Notes the forward hooks of a module's parts: a hook that is added or removed before backward changes no recompute.

What is noted lives as long as the graph, and a hook may hold tensors of that graph: then neither would ever be freed.
So a hook that is removed is held by its code and by what its closure contained (`held_values`). One whose object nobody
else holds is gone, and running the forward again without it is refused. Hooks of all modules are noted, too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lowtide._torch import forward_hooks_of, global_forward_hooks, have_forward_hooks
from lowtide.errors import InPlaceError
from lowtide.held_values import GONE, hold

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

    def __bool__(self) -> bool:
        """Return whether there were any."""
        return self._hooks is not None

    def are_unchanged(self) -> bool:
        """Return whether the parts have the same hooks. Each hook has a number that no other gets."""
        if self._hooks is None:
            return not have_forward_hooks(self._parts)
        return [*map(tuple, self._places())] == [*map(tuple, self._hooks)]

    @contextlib.contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Let the parts have the hooks that were noted inside, and afterwards those that they have now."""
        places = self._places()
        now = [dict(place) for place in places]
        noted = self._hooks or [{} for _ in places]
        found = [
            {key: hooks[key] if key in hooks else held() for key, held in own.items()}
            for hooks, own in zip(now, noted, strict=True)
        ]
        if any(hook is GONE for hooks in found for hook in hooks.values()):
            raise InPlaceError(
                f"{name}: a forward hook of one of its parts was removed between forward and backward, and nobody "
                "holds the object that it belongs to, so the forward cannot be run again with it. Remove hooks after "
                "backward, or keep that object until then"
            )
        try:
            for place, hooks in zip(places, found, strict=True):
                _fill(place, hooks)
            yield
        finally:
            for place, hooks in zip(places, now, strict=True):
                _fill(place, hooks)

    def _places(self) -> list[dict[int, Any]]:
        return [*global_forward_hooks(), *(place for part in self._parts for place in forward_hooks_of(part))]


def _held(hook: Any) -> Callable[[], Any]:
    """Return a function that returns a hook; the one behind it, if it is watched for a moment."""
    return hold(getattr(hook, "watched_function", hook))


def _fill(place: dict[int, Any], hooks: dict[int, Any]) -> None:
    place.clear()
    place.update(hooks)
