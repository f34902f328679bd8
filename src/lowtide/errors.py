"""The one exception tree: everything that Lowtide raises on purpose is a `LowtideError`.

    LowtideError                 the base class: catches all of them
    |-- InvalidValueError        an argument or a setting cannot be honoured [ValueError]
    |-- MissingDependencyError   an optional package is not installed [ImportError]
    |-- SimDeviceError           the emulated device cannot be used here [RuntimeError]
    |   `-- SimBuildError        its extension could not be compiled
    |-- DeviceViolationError     a program broke the rules of an asynchronous device [RuntimeError]
    |-- OffloadError             saved tensors cannot be moved as asked [RuntimeError]
    |   `-- StoreError           a store failed, or cannot be used as asked
    |-- TransformError           torch cannot run a region or tiles in this place [RuntimeError]
    |-- InPlaceError             a saved tensor was changed in place [RuntimeError]
    |-- SilentNoOpError          a region kept its activations although the policy says otherwise [RuntimeError]
    |-- CacheError               a recompute would need a key-value cache [RuntimeError]
    |-- NoRegionError            the model has no region that a policy could act on [ValueError]
    |-- NotTokenWiseError        a module cannot be tiled: it mixes tokens [ValueError]
    |   `-- CannotCutError       a block cannot run in tiles with its attention
    |       `-- OddCallError     one of its calls cannot; others may
    |-- LogitsNotComputedError   the logits were deferred, and something reads them [AttributeError]
    |-- PlanError                a training step cannot be simulated [RuntimeError]
    |   |-- DoesNotFitError      no policy fits the budget
    |   `-- OutOfCapacityError   a simulated allocator ran out of memory
    |-- CannotAuditError         the audit has no training step to judge by [ValueError]
    |   |-- CannotSetUpError     another library's set-up does not fit the model
    |   `-- NoGradientError      the loss requires no gradient
    |-- CannotBuildError         the zoo found no tiny model of an architecture that trains
    `-- DemoError                the demo did not show what it should

A message says what was wrong, where, and what to do about it. An error with a natural built-in parent (in brackets,
inherited by its children) is one, too, so that callers who never heard of Lowtide handle it as usual.

A check that fails is not an error: it is a verdict of the audit.
"""

from __future__ import annotations


class LowtideError(Exception):
    """Base class of all errors that Lowtide raises on purpose."""

    __module__ = "lowtide"


class InvalidValueError(LowtideError, ValueError):
    """An argument or setting has a value that cannot be honoured."""


class MissingDependencyError(LowtideError, ImportError):
    """An optional package is needed for what was asked; the message names the extra to install."""


class SimDeviceError(LowtideError, RuntimeError):
    """The emulated device cannot be used here."""


class SimBuildError(SimDeviceError):
    """The emulated device could not be compiled: no compiler, no ninja, or the compiler failed."""


class DeviceViolationError(LowtideError, RuntimeError):
    """A program broke the rules of an asynchronous device (raised by the emulated one, on request)."""


class OffloadError(LowtideError, RuntimeError):
    """Saved tensors cannot be moved as asked."""


class StoreError(OffloadError):
    """A store cannot be used as asked, or failed while it held or moved bytes; the message names place and remedy."""


class TransformError(LowtideError, RuntimeError):
    """A region or tiles are inside a transform that torch has no way to run them in: torch.func, compiled autograd."""


class InPlaceError(LowtideError, RuntimeError):
    """A tensor that backward needs was changed in place after it was saved."""


class SilentNoOpError(LowtideError, RuntimeError):
    """A region should have been recomputed, offloaded or tiled, and was not."""


class CacheError(LowtideError, RuntimeError):
    """A region that is to be recomputed depends on the contents of a key-value cache."""


class NoRegionError(LowtideError, ValueError):
    """The model has no region that a policy could act on."""


class NotTokenWiseError(LowtideError, ValueError):
    """A module that should be tiled computes something for one token that depends on other tokens."""


class CannotCutError(NotTokenWiseError):
    """A block cannot run in tiles with its attention. Its text is the reason, without the block's name."""


class OddCallError(CannotCutError):
    """One call of a block cannot be cut along its tokens. That says nothing about the block's other calls."""


class LogitsNotComputedError(LowtideError, AttributeError):
    """Something asked for logits that tile(loss) never computes."""


class PlanError(LowtideError, RuntimeError):
    """A step cannot be simulated: too little is known about the model, the batch or the device."""


class DoesNotFitError(PlanError):
    """No policy fits the budget; the message says how much the smallest one needs."""


class OutOfCapacityError(PlanError):
    """The simulated allocator cannot serve a request within its capacity. The planner catches it as it searches."""


class CannotAuditError(LowtideError, ValueError):
    """The model, the batch or the loss do not allow even one training step to judge by."""


class CannotSetUpError(CannotAuditError):
    """Another library's set-up cannot be applied to this model; the message says what the model lacks."""


class NoGradientError(CannotAuditError):
    """The loss requires no gradient. The plain model cannot be audited then; a set-up fails its audit."""


class CannotBuildError(LowtideError):
    """No tiny model of an architecture could be made to train; the message says what was tried."""

    _SHOWN = 4
    """How many different reasons are shown from the beginning of the list, and how many from its end."""

    def __init__(self, model_type: str, reasons: list[str]) -> None:
        self.model_type = model_type
        self.reasons = tuple(reasons)
        different = list(dict.fromkeys(reasons))
        left_out = len(different) - 2 * self._SHOWN
        if left_out > 0:
            different = [*different[: self._SHOWN], f"... {left_out} more ...", *different[-self._SHOWN :]]
        super().__init__("\n  ".join([f"No tiny model of {model_type!r} could be built:", *different]))


class DemoError(LowtideError):
    """The demo did not show what it should; the message says which part."""


def by_name(name: str) -> type[LowtideError]:
    """Return the error class of that name in this tree; a name that is not in it stands for a `PlanError`.

    Errors come back from the planning process as a name and a message.
    """
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, LowtideError) else PlanError
