"""Lets a tile be run again in backward with what it computed with: its module's weights, numbers and hooks.

Weights are noted once for a call; a changed one is refused. What a program may change before backward (`model.eval()`,
a schedule of dropout's `p`, an adapter that is switched off, a hook) is noted for each tile, and found again by it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from lowtide._torch import parts_of
from lowtide.attributes import AttributeHabits, NotedAttributes
from lowtide.buffers import Snapshot
from lowtide.noted_hooks import NotedHooks
from lowtide.weights import as_in_forward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.tiling.tiled_function import TiledFunction
    from lowtide.weights import RefuseSaved


class Noted(NamedTuple):
    """What the parts of a module held as a tile began."""

    hooks: NotedHooks
    attributes: NotedAttributes


class CallState:
    """What one call of a tiled function computes with, beside its arguments."""

    def __init__(self, tiled: TiledFunction, name: str) -> None:
        self._name = name
        self._module = tiled.module
        self._weights = tiled.weights()
        self._parts = [] if tiled.module is None else parts_of([tiled.module])
        self._called = self._parts if tiled.function is tiled.module else self._parts[1:]
        """The parts whose hooks run: not the module itself, if its forward is called from within them."""
        self._habits = AttributeHabits()

    def note(self) -> Noted:
        """Note what a tile finds as it begins."""
        return Noted(NotedHooks(self._called), self._habits.note(self._parts))

    @contextlib.contextmanager
    def restored(self, noted: Noted) -> Iterator[RefuseSaved | None]:
        """Let a tile find that inside, and unchanged weights; afterwards the module is as it is now.

        If weights have changed, it hands out a function that must be called for each tensor that is saved inside.
        """
        before = None if self._module is None else Snapshot(self._module.modules())
        with contextlib.ExitStack() as stack:
            if before is not None:
                stack.callback(lambda: before.changed().restore())
            refuse_saved = stack.enter_context(as_in_forward(self._weights, self._name))
            if not noted.hooks.are_unchanged():
                stack.enter_context(noted.hooks.restored())
            stack.enter_context(noted.attributes.restored())
            yield refuse_saved
