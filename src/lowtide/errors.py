"""The one exception tree: everything Lowtide raises on purpose is a `LowtideError`.

A message names what was wrong, where, and what to do about it. Errors that have a natural built-in parent (a bad value,
a failed import) inherit from it too, so that callers who never heard of Lowtide handle them as usual.

Why an audit could not be run at all. A check that fails is no error: it is a verdict.
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


class InPlaceError(LowtideError, RuntimeError):
    """A tensor that backward needs was changed in place after it was saved."""


class SilentNoOpError(LowtideError, RuntimeError):
    """A region should have been recomputed or offloaded, and was not."""


class CacheError(LowtideError, RuntimeError):
    """A block that is to be recomputed needs what is in a key-value cache."""


class NoRegionError(LowtideError, ValueError):
    """No block was found in the model that a policy could act on."""


class NotTokenWiseError(LowtideError, ValueError):
    """A module that should be tiled makes something of a token that depends on other tokens."""


class LogitsNotComputedError(LowtideError, AttributeError):
    """Something asked for logits that tile(loss) never computes."""


class PlanError(LowtideError, RuntimeError):
    """A step cannot be simulated: the model, the batch or the device is not known well enough."""


class DoesNotFitError(PlanError):
    """No policy fits the budget; the message says what the least is."""


class CannotAuditError(LowtideError, ValueError):
    """The model, the batch or the loss do not allow even one training step to judge by."""


class NoGradientError(CannotAuditError):
    """The loss needs no gradient. Of the plain model there is nothing to judge then; of a set-up it is a verdict."""


def by_name(name: str) -> type[LowtideError]:
    """Return the error class of that name in this tree; a name that is not in it stands for a `PlanError`.

    Errors come back from the planning process as a name and a message.
    """
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, LowtideError) else PlanError
