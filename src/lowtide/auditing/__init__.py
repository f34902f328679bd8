"""Audit: proof that checkpointing is active and right, for any model and anybody's set-up.

Nothing here imports Lowtide's own engine: it is judged like everybody else's.
"""

from __future__ import annotations

from lowtide.auditing.errors import CannotAuditError
from lowtide.auditing.function import CHECKS, audit
from lowtide.auditing.verdicts import AuditReport, Check, Verdict

__all__ = ["CHECKS", "AuditReport", "CannotAuditError", "Check", "Verdict", "audit"]
