"""Lets a tile be run again in backward with what it computed with: weights, buffers, attributes, parts and hooks.

Weights are noted once for a call; a changed one is refused. What a program may change before backward (`model.eval()`,
a schedule of dropout's `p`, an adapter that is switched off, a mask, a hook) is noted for each tile, and found again by
it. Of a plain function, that goes for what its closure refers to.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lowtide._torch import have_buffers, have_forward_hooks, parts_of
from lowtide.attributes import AttributeHabits
from lowtide.buffers import Snapshot
from lowtide.noted_hooks import NotedHooks
from lowtide.noted_places import NotedPlaces
from lowtide.weights import as_in_forward, watched, weights_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.closures import Reached
    from lowtide.tiling.tiled_function import TiledFunction
    from lowtide.weights import RefuseSaved, Weight


class CallState:
    """What one call of a tiled function computes with, beside tensors among its arguments."""

    def __init__(self, tiled: TiledFunction, reached: Reached, name: str) -> None:
        self.name = name
        self.modules, self.places = reached
        self.is_forward = tiled.module is not None and tiled.function is not tiled.module
        """Whether the module's forward is called from within its hooks."""
        self.is_tried = tiled.is_tried and tiled.module is not None
        """Whether a trial has shown that no tile changes a buffer that others read."""
        self.habits = AttributeHabits()
        own = parts_of(self.modules)
        parts, _ = self.habits.note(own, len(self.modules), skip_forward=self.is_forward, have_hooks=False)
        self.weights = weights_in(parts, skip_first=self.is_forward)

    def note(self) -> NotedTile:
        """Note what a tile finds as it begins."""
        return NotedTile(self)


class NotedTile:
    """What one tile computes with: noted as it begins, settled as it ends, found again as it is repeated."""

    def __init__(self, call: CallState) -> None:
        self._call = call
        parts = parts_of(call.modules)
        parts, self._attributes = call.habits.note(
            parts, len(call.modules), skip_forward=call.is_forward, have_hooks=have_forward_hooks(parts)
        )
        self._hooks = NotedHooks(parts[1:] if call.is_forward else parts)
        self._outside = NotedPlaces(call.places) if call.places else None
        self._parts = parts if have_buffers(parts) else []
        self._buffers = Snapshot(self._parts, copies_large=not call.is_tried)
        self._watched: list[Weight] = []

    def settle(self) -> None:
        """Note what the tile has changed itself, after it."""
        self._buffers = self._buffers.noted(lambda *_: False)
        self._watched = [watched(name, buffer, "buffer") for name, buffer in self._buffers.watched()]
        self._attributes.settle()
        if self._attributes.places is not None:
            self._attributes.places.settle()
            self._watched += self._attributes.places.weights()
        if self._outside is not None:
            self._outside.settle_function()
            self._watched += self._outside.weights()

    @contextlib.contextmanager
    def restored(self) -> Iterator[RefuseSaved | None]:
        """Let the tile find that inside, and unchanged weights; afterwards all is as it is now.

        If weights have changed, it hands out a function that must be called for each tensor that is saved inside.
        """
        name = self._call.name
        now = Snapshot(self._parts) if self._call.is_tried else None
        with contextlib.ExitStack() as stack:
            if now is not None:  # a tile that writes to a large buffer, of which no copy was kept
                stack.callback(lambda: now.changed().restore())
            stack.enter_context(self._buffers.restored())
            refuse_saved = stack.enter_context(as_in_forward([*self._call.weights, *self._watched], name))
            if self._outside is not None:
                stack.enter_context(self._outside.restored(name))
            stack.enter_context(self._attributes.restored(name))
            if not self._hooks.are_unchanged():
                stack.enter_context(self._hooks.restored(name))
            yield refuse_saved
