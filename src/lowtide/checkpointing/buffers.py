"""A module that is run again changes its buffers once.

Its first run notes what its changing buffers held before; every later run finds those values, and leaves the buffers as
it found them. So a recomputation computes what forward computed, and running statistics are updated once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.buffers import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable


def run_once_for_buffers(function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """`function`, changing the buffers of its module once: of the one given, of itself, or of the one that it is of."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    owner = module if module is not None else owner
    if not isinstance(owner, nn.Module) or next(owner.buffers(), None) is None:
        return function
    return _OnceForBuffers(function, owner)


class _OnceForBuffers:
    """A module's forward, run again and again."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self._function = function
        self._module = module
        self._before: Snapshot | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is None:
            before = Snapshot(self._module)
            result = self._function(*args, **kwargs)
            self._before = before.changed()
            return result
        after = self._before.again()
        self._before.restore()
        try:
            return self._function(*args, **kwargs)
        finally:
            after.restore()
