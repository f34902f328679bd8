"""Sees the one call in a transformer block that is not token-wise: its call of an attention function.

transformers' models ask one object for the function that computes attention, in every forward, and call what they get
as `function(module, query, key, value, mask, ...)`. While `seen_by` is in force, this thread gets a stand-in instead,
and no other thread does. What is replaced for that is put back as soon as no thread needs it: between the runs of
tiles, transformers is as it was.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any

from lowtide._torch import outside_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    StandIn = Callable[..., Any]
    """Called as the attention function would be, with that function as its first argument."""

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name by which the models' modules know the object that they ask."""


def asks_for_attention(module: nn.Module) -> bool:
    """Return whether a module asks for an attention function itself, in any of its class's methods."""
    classes = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    methods = (method for kind in classes for method in vars(kind).values() if inspect.isfunction(method))
    return any(_INTERFACE in inspect.unwrap(method).__code__.co_names for method in methods)


@contextlib.contextmanager
def seen_by(stand_in: StandIn) -> Iterator[None]:
    """Let `stand_in` answer the calls of attention functions inside, in this thread."""
    token = _stand_in.set(stand_in)
    _seam.enter()
    try:
        yield
    finally:
        _seam.leave()
        _stand_in.reset(token)


_stand_in: contextvars.ContextVar[StandIn | None] = contextvars.ContextVar("stand_in", default=None)


class _Seam:
    """The method of transformers' class that hands out attention functions, replaced while any thread needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._replaced: tuple[Any, str, Any] | None = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._replace()

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._replaced is not None:
                owner, name, method = self._replaced
                self._replaced = None
                if method is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, method)

    def _replace(self) -> None:
        modeling = sys.modules.get("transformers.modeling_utils")
        interface = getattr(modeling, "AttentionInterface", None)
        if interface is None:
            return
        # transformers 5 has a method for it. Before, models looked the name up themselves, but for eager attention.
        name = "get_interface" if hasattr(interface, "get_interface") else "__getitem__"
        plain = getattr(interface, name)
        self._replaced = (interface, name, vars(interface).get(name))

        @outside_graph
        @functools.wraps(plain)
        def hand_out(*args: Any, **kwargs: Any) -> Any:
            function, stand_in = plain(*args, **kwargs), _stand_in.get()
            return function if stand_in is None else outside_graph(functools.partial(stand_in, function))

        setattr(interface, name, hand_out)


_seam = _Seam()
