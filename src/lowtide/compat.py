"""Versions: what Lowtide is tested with, and the shims for what differs between versions and what has no public name.

A shim lives here and nowhere else. It names what it covers, and the version from which it can go if there is one.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.version import Version
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, _StopRecomputationError, noop_context_fn

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MINIMUM = {
    "torch": Version("2.10"),
    "transformers": Version("4.57"),
    "accelerate": Version("1.10"),
    "peft": Version("0.17"),
    "trl": Version("0.23"),
    "deepspeed": Version("0.18"),
}
"""The oldest versions that the package's metadata admits."""

TESTED = {
    "torch": Version("2.13.0"),
    "transformers": Version("5.22.2"),
    "accelerate": Version("1.15.0"),
    "peft": Version("0.21.2"),
    "trl": Version("1.16.0"),
    "deepspeed": Version("0.19.8"),
}
"""The versions that the tests run with (`constraints.txt` pins the same)."""


def installed_version(package: str) -> Version | None:
    """The version of an installed package, read from its metadata: nothing is imported."""
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def non_reentrant_checkpoint(
    function: Callable[..., T],
    *args: Any,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
) -> T:
    """Torch's non-reentrant checkpoint itself. Its public name is what frameworks replace, and so do we."""
    steps = _checkpoint_without_reentrant_generator(
        function, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args
    )
    next(steps)
    try:
        result = function(*args)
    except BaseException as error:
        steps.throw(error)
        raise
    next(steps, None)
    return result


def stop_of_recomputation(error: RuntimeError) -> BaseException:
    """What torch's checkpoint waits for, if this error stands for it; else the error itself.

    Torch ends a recomputation early by an exception without words, raised as the last tensor is saved. If that happens
    inside a `torch.jit.script` function (ZoeDepth has one), the interpreter turns it into a RuntimeError without words.
    Whether everything was recomputed by then, torch counts afterwards.
    """
    text = str(error)
    is_wordless = "TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:")
    return _StopRecomputationError() if is_wordless else error


def recorded_outputs() -> dict[str, Any]:
    """The lists that transformers' hooks append outputs to while a forward runs (5.0 and later); it has no public name.

    Empty if none runs, or transformers is not loaded.
    """
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return (collector.get() if collector is not None else None) or {}
