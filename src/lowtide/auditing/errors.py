"""Why an audit could not be run at all. A check that fails is no error: it is a verdict."""

from __future__ import annotations

from lowtide.errors import LowtideError


class CannotAuditError(LowtideError, ValueError):
    """The model, the batch or the loss do not allow even one training step to judge by."""
