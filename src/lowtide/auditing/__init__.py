"""Audit: proof that checkpointing is active and right, for any model and anybody's set-up.

Nothing here imports Lowtide's own engine: it is judged like everybody else's.
"""

from __future__ import annotations

from lowtide.auditing.audit import CHECKS, audit
from lowtide.auditing.report import AuditReport, CheckResult, Verdict
from lowtide.errors import CannotAuditError

__all__ = ["CHECKS", "AuditReport", "CannotAuditError", "CheckResult", "Verdict", "audit"]
