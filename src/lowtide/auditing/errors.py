"""Why an audit could not be run at all. A check that fails is no error: it is a verdict."""

from __future__ import annotations

from lowtide.errors import LowtideError


class CannotAuditError(LowtideError, ValueError):
    """The model, the batch or the loss do not allow even one training step to judge by."""


class NoGradientError(CannotAuditError):
    """The loss needs no gradient. Of the plain model there is nothing to judge then; of a set-up it is a verdict."""
