"""Keeps the outputs of dear operators in a region's forward, and hands them out again in its recompute.

The first call of a region is looked at closely. It shows where dear operators are called; from then on, only those
places are watched (`kept_calls`). What they return is held by the call (`kept_outputs`). If a call keeps more or less
than the ones before it, the next one is looked at again.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from lowtide._torch import uncompiled
from lowtide.checkpointing.kept_calls import Keep, Look, Recall, left_alone, run_watched
from lowtide.checkpointing.kept_outputs import KeptOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lowtide.checkpointing.kept_calls import Places
    from lowtide.checkpointing.kept_operators import KeptOperators
    from lowtide.checkpointing.schedule import RegionCall
    from lowtide.counters import RegionLedger


class Keeping:
    """What a region keeps, and what its calls have shown so far about where to look for it."""

    def __init__(self, operators: KeptOperators) -> None:
        self.operators = operators
        self.seen: collections.Counter[str] = collections.Counter()
        """The operators that a call of the region used, for the message if none of them is dear."""
        self.changed: set[str] = set()
        """Operators whose outputs the region changes in place."""
        self.places: Places | None = None
        """Where to look; None if the next call shall show it."""
        self.running: KeptCall | None = None
        """The call that runs right now, for the first time or again."""

    def begin(self, module: nn.Module | None, ledger: RegionLedger) -> KeptCall:
        """Begin a call of the region, whose module is `module` if it is one's forward."""
        return KeptCall(self, module, ledger)


def keeping_of(function: Callable[..., Any], operators: KeptOperators) -> Keeping:
    """Return what earlier calls of `function` have shown, if it lives on between calls; else begin anew."""
    owner = getattr(function, "__self__", function)
    try:
        known = _known.setdefault(owner, {})
    except TypeError:  # it cannot be referred to weakly
        return Keeping(operators)
    return known.setdefault(operators.words, Keeping(operators))


_known: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Keeping]] = weakref.WeakKeyDictionary()
"""What is known about functions that no policy acts on. An entry dies with its function or module."""


class KeptCall:
    """One call of a region that keeps something: `run` for its forward, `run_again` for each recompute."""

    def __init__(self, region: Keeping, module: nn.Module | None, ledger: RegionLedger) -> None:
        self.outputs = KeptOutputs(region.operators, ledger)
        self.of_tiles = KeptOutputs(region.operators, ledger)
        """What the tiles of a block keep, by their numbers. Modes do not look into tiles."""
        self._region = region
        self._mode: Look | Keep | Recall | None = None
        """What sees the operators of the run that is on."""
        self._places = region.places
        self._module = None if module is None else weakref.ref(module)

    def offload_with(self, call: RegionCall) -> None:
        """Let what is kept leave the device with the region's inputs."""
        self.outputs.call = self.of_tiles.call = call

    def looking_away(self) -> contextlib.AbstractContextManager[None]:
        """Let no mode see what runs inside: tiles, which keep what they compute themselves, and trials."""
        return contextlib.nullcontext() if self._mode is None else self._mode.switch

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's forward, and keep the outputs of dear operators."""
        with self._running():
            result = self._run(function, args, kwargs)
        self._region.changed |= self.outputs.drop_changed() | self.of_tiles.drop_changed()
        return result

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if uncompiled(function) is not function:  # all of it is the compiler's business
            return function(*args, **kwargs)
        if self._places is None:
            self._mode = look = Look(self.outputs, None if self._module is None else self._module())
            with look, look.functions, left_alone(look.compiled, look.switch):
                result = function(*args, **kwargs)
            self._region.seen = look.seen
            self._region.places = look.places()
            self._places = look.places_of_all()
            return result
        self._mode = Keep(self.outputs)
        result = run_watched(self._places, self._mode, function, args, kwargs)
        if self.outputs.count != self._places.kept:
            self._region.places = None
        return result

    def run_again(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it again; dear operators return what they returned before, without computing it."""
        if self._places is None:  # the forward itself asks for a gradient, while it is looked at
            return function(*args, **kwargs)
        self._mode = Recall(self.outputs)
        with self._running():
            return run_watched(self._places, self._mode, function, args, kwargs)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        before, self._region.running = self._region.running, self
        try:
            yield
        finally:
            self._region.running = before
            self._mode = None
