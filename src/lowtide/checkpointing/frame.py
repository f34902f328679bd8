"""Runs torch's checkpoint without what a plain call of it does not need: a quarter less time for a small region.

Torch's own function stands ready for everything at every call: it looks for devices in any structure, copies generators
by a context manager, and enters two contexts of autocast in backward. Most calls have a list of tensors on one kind of
device, and backward finds autocast as it was. Such a call uses torch's frame and torch's hooks, which do the work, and
notes beside them what a recompute must find. All other calls are torch's.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lowtide._torch import has_started, new_frame, non_reentrant_checkpoint, pop_hooks, push_hooks
from lowtide.checkpointing.saved_versions import hand_out
from lowtide.randomness import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lowtide._torch import CheckpointSettings


class Replay(Protocol):
    """A function to be run on tensors now and again in backward."""

    region: str
    versions: dict[int, int]
    """What it saves is compared with these when backward asks for it."""
    is_compared: bool
    """Whether somebody does so already, and it need not."""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run it."""


def run_checkpoint(
    function: Replay,
    tensors: Sequence[torch.Tensor],
    settings: CheckpointSettings,
    respect_saved_tensors_hooks: bool | None,
) -> Any:
    """Run a function on tensors in torch's checkpoint."""
    kind = _kind_of_device(tensors)
    again = None if kind is None else _Again(function, kind, tensors if settings.preserve_rng_state else None)
    made = None if again is None else new_frame(again, tensors, settings)
    if made is None:
        return non_reentrant_checkpoint(function, tensors, settings, respect_saved_tensors_hooks)
    frame, hooks = made
    push_hooks(hooks.pack_hook, functools.partial(hand_out, function.region, function.versions, hooks.unpack_hook))
    function.is_compared = True
    try:
        result = function(*tensors)
    finally:
        pop_hooks()
    frame.forward_completed = True
    return result


class _Again:
    """Runs a function again as it was run: with the same random numbers and the same autocast."""

    __slots__ = ("_autocast", "_function", "_kinds", "_random")

    def __init__(self, function: Callable[..., Any], kind: str, tensors: Sequence[torch.Tensor] | None) -> None:
        self._function = function
        self._kinds = ("cpu", kind) if kind != "cpu" and torch.amp.is_autocast_available(kind) else ("cpu",)
        self._autocast = _autocast(self._kinds)
        self._random = None if tensors is None else RandomState(*tensors)

    def __call__(self, *tensors: torch.Tensor) -> None:
        if self._random is None:
            return self._run(tensors)
        now = self._random.again()
        self._random.set()
        try:
            self._run(tensors)
        finally:
            now.set()

    def _run(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if _autocast(self._kinds) == self._autocast:
            self._function(*tensors)
            return
        with self._autocast_restored():
            self._function(*tensors)

    @contextlib.contextmanager
    def _autocast_restored(self) -> Iterator[None]:
        is_cached, *noted = self._autocast
        with contextlib.ExitStack() as stack:
            for kind, (is_enabled, dtype) in zip(self._kinds, noted, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, is_enabled, is_cached))
            yield


def _autocast(kinds: tuple[str, ...]) -> tuple[Any, ...]:
    """Return whether casts are cached, and for each kind of device whether autocast is on, and to what it casts."""
    settings = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_autocast_cache_enabled(), *settings


def _kind_of_device(tensors: Sequence[torch.Tensor]) -> str | None:
    """Return the kind of device whose generators a region may draw from; None where torch should say."""
    kinds = {tensor.device.type for tensor in tensors}
    kinds.discard("cpu")
    if not kinds:
        default = torch.utils.checkpoint.DefaultDeviceType.get_device_type()
        return default if has_started(default) else None
    return kinds.pop() if len(kinds) == 1 and "meta" not in kinds else None
