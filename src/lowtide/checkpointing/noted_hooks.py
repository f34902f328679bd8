"""Notes the forward hooks of a module's parts: a hook that is added or removed before backward changes no recompute."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lowtide._torch import forward_hooks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class NotedHooks:
    """The hooks of some parts as they were when a forward began."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._places = [place for part in parts for place in forward_hooks_of(part)]
        self._keys = [*map(tuple, self._places)]
        self._hooks = [(place, dict(place)) for place in self._places if place]

    def are_unchanged(self) -> bool:
        """Return whether the parts have the same hooks. Each hook has a number that no other gets."""
        return self._keys == [*map(tuple, self._places)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the parts have the hooks that were noted inside, and afterwards those that they have now."""
        now = [(place, dict(place)) for place in self._places]
        noted = {id(place): hooks for place, hooks in self._hooks}
        try:
            for place, _ in now:
                _fill(place, noted.get(id(place), {}))
            yield
        finally:
            for place, hooks in now:
                _fill(place, hooks)


def _fill(place: dict[int, Any], hooks: dict[int, Any]) -> None:
    place.clear()
    place.update(hooks)
