"""`lowtide.patch_torch`: replaces torch's checkpoint function, for frameworks that call it themselves.

The replacement is an object that knows what it replaced. It is put wherever a loaded module holds the function: in
`torch.utils.checkpoint` and under the names by which frameworks imported it (`transformers.modeling_utils.checkpoint`,
DeepSpeed's own). Removing it puts back, place by place, what was there, also in modules that imported the name
meanwhile; references that survive elsewhere pass calls on.

Patches stack: one made inside another is on top, and may be removed in any order. Somebody else's patch that is found
underneath is named in a warning and left as it is: it answers no call while ours is in force. Names that still mean
torch's own function, because they were imported before that patch, are answered as well.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
import threading
import types
import warnings
from typing import TYPE_CHECKING, Any, Literal

from lowtide.checkpointing import Schedule
from lowtide.checkpointing._torch import CHECKPOINT_KEYWORDS
from lowtide.checkpointing.checkpoint import checkpoint
from lowtide.checkpointing.schedule import as_schedule
from lowtide.stores import HostStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from lowtide.stores import Store

_REPLACED = (
    ("torch.utils.checkpoint", "checkpoint"),
    ("deepspeed.runtime.activation_checkpointing.checkpointing", "checkpoint"),
)
"""Torch's function, and functions of other packages that do the same; replaced if they are loaded."""

_SETTINGS = CHECKPOINT_KEYWORDS | {"respect_saved_tensors_hooks"}
"""Keywords of torch's function: this torch's own, and the one that frameworks pass to older ones as well."""

_BYPASSED = (("torch.utils.checkpoint", "CheckpointFunction"),)
"""What the replaced functions call: somebody's patch there has no effect while they are replaced."""

_installing = threading.RLock()


def patch_torch(offload: Literal["host"] | Store | Schedule | None = None) -> TorchPatch:
    """Answer every call of torch's `checkpoint` with `lowtide.checkpoint`, until the patch is removed.

    Whatever `use_reentrant` the caller passes, there is one graph, and with `offload` the inputs leave the device. The
    patch is a context manager; `.remove()` ends it as well. For models that you build yourself, `lowtide.apply` is the
    better way: it patches instances, and checks that it is active.

    A function that was stored before the patch, such as the one that `gradient_checkpointing_enable()` binds to a
    model, is not found: enable checkpointing inside. `patch.calls` counts the calls that were answered, and removing a
    patch that was never called warns.
    """
    # one schedule for all calls, so that a region's copies hide behind the next one's compute
    schedule = Schedule(HostStore()) if offload == "host" else as_schedule(offload)
    patch = TorchPatch(schedule)
    patch.install()
    return patch


patch_torch.__module__ = "lowtide"


class TorchPatch:
    """A replacement of torch's checkpoint function, and the handle that undoes it."""

    def __init__(self, schedule: Schedule | None) -> None:
        self.calls = 0
        """Calls that this patch has answered."""
        self.was_reached = False
        """Whether a call reached it, or a patch on top of it."""
        self._schedule = schedule
        self._replacements: list[_Replacement] = []

    def install(self) -> None:
        """Replace the functions wherever loaded modules hold them."""
        with _installing:
            # all warnings first: where they are errors, nothing has been replaced yet
            for module_name, name in (*_REPLACED, *_BYPASSED):
                if module_name in sys.modules:
                    _warn_about_foreign_patch(module_name, name)
            for module_name, name in _REPLACED:
                if module_name in sys.modules:
                    for below in _current_and_genuine(module_name, name):
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
        """Answer one call of a replaced function. Torch's own keywords are settings, the rest is the function's."""
        settings = {name: kwargs.pop(name) for name in _SETTINGS & kwargs.keys()}
        return self.run_curried(settings, function, args, kwargs)

    def run_curried(
        self, settings: dict[str, Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer one call of a function that `checkpoint(**settings)` wrapped."""
        self.calls += 1
        return checkpoint(offload=self._schedule, **settings)(function)(*args, **kwargs)

    def _put_everywhere(self, replacement: _Replacement) -> None:
        self._replacements.append(replacement)
        for module, name in _holders(replacement.below):
            setattr(module, name, replacement)


class _Replacement:
    """Stands where a checkpoint function stood, under its name: other patches look at `__name__` before they act."""

    def __init__(self, patch: TorchPatch, below: Callable[..., Any]) -> None:
        functools.update_wrapper(self, below, updated=())
        self.is_active = True
        self._below = below
        self._patch = patch

    @property
    def below(self) -> Callable[..., Any]:
        """What to put back: the next function down that is still in force."""
        while isinstance(self._below, _Replacement) and not self._below.is_active:
            self._below = self._below.below
        return self._below

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_active:
            return self.below(*args, **kwargs)
        if not args and "function" not in kwargs:
            return functools.partial(self._curried, kwargs)
        self.note_call()
        function, *rest = args or (kwargs.pop("function"),)
        return self._patch.run(function, tuple(rest), kwargs)

    def _curried(self, settings: dict[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function as `checkpoint(**settings)` does since torch 2.14. Once removed, torch's own answers."""

        @functools.wraps(function, updated=())
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not self.is_active:
                bound = functools.partial(function, **kwargs) if kwargs else function
                return self.below(bound, *args, **settings)
            self.note_call()
            return self._patch.run_curried(settings, function, args, kwargs)

        return checkpointed

    def __deepcopy__(self, _: Any) -> Self:
        """Copy as functions are copied, by reference: a model's copy is not patched for longer than the model."""
        return self

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        """Pickle as functions are pickled, by name."""
        return pkgutil.resolve_name, (":".join(map(str, _origin(self))),)

    def note_call(self) -> None:
        """Take note of a call, also for the patches further down, which would have answered it."""
        self._patch.was_reached = True
        if isinstance(self.below, _Replacement):
            self.below.note_call()


def _holders(value: Any) -> list[tuple[types.ModuleType, str]]:
    """Return all names of loaded modules that mean this very object."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, held in list(getattr(module, "__dict__", {}).items())
        if held is value
    ]


def _current_and_genuine(module_name: str, name: str) -> list[Any]:
    """Return what a module's name means now, and the function that the module defined, if it is still held anywhere."""
    current = sys.modules[module_name].__dict__[name]
    found = {id(current): current}
    for module in list(sys.modules.values()):
        for held in list(getattr(module, "__dict__", {}).values()):
            # looked at by type: `isinstance` and `getattr` would wake lazy modules
            if type(held) in (types.FunctionType, _Replacement) and _origin(held) == (module_name, name):
                found[id(held)] = held
    return list(found.values())


def _origin(function: Any) -> tuple[str | None, str]:
    """Return the module that defined a function, and its name there."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))


def _warn_about_foreign_patch(module_name: str, name: str) -> None:
    held = sys.modules[module_name].__dict__[name]
    if isinstance(held, _Replacement):
        return
    origin, its_name = _origin(held)
    if origin != module_name:
        warnings.warn(
            f"lowtide: {module_name}.{name} was already replaced by {origin}.{its_name}: that stays in place, but "
            "Lowtide's patch is on top and answers every call, so whatever it does (offload, most often) does not "
            "happen until Lowtide's patch is removed",
            stacklevel=4,
        )
