"""`lowtide.patch_torch`: torch's checkpoint function replaced, for frameworks that call it themselves.

The replacement is an object that knows what it replaced. It is put wherever a loaded module holds the function: in
`torch.utils.checkpoint` and under the names that others have imported (`transformers.modeling_utils.checkpoint`,
DeepSpeed's own). Removing it puts back, place by place, what was there, also in modules that imported the name
meanwhile; references that survive elsewhere pass calls on.

Patches stack: one made inside another is on top, and may be removed in any order.
"""

from __future__ import annotations

import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, Literal

from lowtide.checkpointing import Schedule
from lowtide.checkpointing.core import as_schedule, checkpoint
from lowtide.stores import HostStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType, TracebackType
    from typing import Self

    from lowtide.stores import Store

_OTHERS = (("deepspeed.runtime.activation_checkpointing.checkpointing", "checkpoint"),)
"""Functions of other packages that do what torch's does; replaced with it if they are loaded."""

_installing = threading.RLock()


def patch_torch(offload: Literal["host"] | Store | Schedule | None = None) -> TorchPatch:
    """Answer every call of torch's `checkpoint` with `lowtide.checkpoint`, until the patch is removed.

    Whatever `use_reentrant` the caller passes, there is one graph, and with `offload` the inputs leave the device. A
    context manager; `.remove()` ends it as well. For models that you build yourself, `lowtide.apply` is the better way:
    it patches instances, and checks that it is active.

    A function that was stored before the patch, such as the one that `gradient_checkpointing_enable()` binds to a
    model, is not found: enable checkpointing inside. `patch.calls` tells how many calls came by, and removing a patch
    that was never called says so in a warning.
    """
    # one schedule for all calls, so that a region's copies hide behind the next one's compute
    schedule = Schedule(HostStore()) if offload == "host" else as_schedule(offload)
    patch = TorchPatch(schedule)
    patch.install()
    return patch


class TorchPatch:
    """A replacement of torch's checkpoint function, and the handle that undoes it."""

    def __init__(self, schedule: Schedule | None) -> None:
        self.calls = 0
        """Calls that this patch has answered."""
        self.was_reached = False
        self._schedule = schedule
        self._replacements: list[_Replacement] = []

    @property
    def is_installed(self) -> bool:
        return bool(self._replacements)

    def install(self) -> None:
        with _installing:
            for module_name, name in (("torch.utils.checkpoint", "checkpoint"), *_OTHERS):
                module = sys.modules.get(module_name)
                if module is not None:
                    below = module.__dict__[name]
                    _name_foreign(module_name, below)
                    self._put_everywhere(_Replacement(self, below))

    def remove(self) -> None:
        """Put everything back. Doing it twice is fine."""
        with _installing:
            if not self._replacements:
                return
            for replacement in self._replacements:
                replacement.is_active = False
                for module, name in _holders(replacement):
                    setattr(module, name, replacement.below)
            self._replacements.clear()
        if not self.was_reached:
            warnings.warn(
                "lowtide: patch_torch was in force and torch's checkpoint was never called. Checkpointing is off, or "
                "the function was stored before the patch: call gradient_checkpointing_enable() inside it",
                stacklevel=2,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        return checkpoint(function, *args, offload=self._schedule, **kwargs)

    def _put_everywhere(self, replacement: _Replacement) -> None:
        self._replacements.append(replacement)
        for module, name in _holders(replacement.below):
            setattr(module, name, replacement)


class _Replacement:
    """Stands where a checkpoint function stood."""

    def __init__(self, patch: TorchPatch, below: Callable[..., Any]) -> None:
        self.is_active = True
        self._below = below
        self._patch = patch

    @property
    def below(self) -> Callable[..., Any]:
        """What to put back: the next one down that is still in force."""
        while isinstance(self._below, _Replacement) and not self._below.is_active:
            self._below = self._below.below
        return self._below

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.is_active:
            return self.below(function, *args, **kwargs)
        self.tell()
        return self._patch.run(function, args, kwargs)

    def tell(self) -> None:
        """A call came by: patches further down would have answered it."""
        self._patch.was_reached = True
        if isinstance(self.below, _Replacement):
            self.below.tell()


def _holders(value: Any) -> list[tuple[ModuleType, str]]:
    """All names of loaded modules that mean this very object."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, held in list(getattr(module, "__dict__", {}).items())
        if held is value
    ]


def _name_foreign(module_name: str, function: Any) -> None:
    if isinstance(function, _Replacement):
        return
    origin = getattr(function, "__module__", None)
    if origin != module_name:
        warnings.warn(
            f"lowtide: {module_name}.checkpoint was already replaced by {origin}."
            f"{getattr(function, '__qualname__', function)}: Lowtide's patch goes on top, and removing it brings that "
            "back",
            stacklevel=4,
        )
