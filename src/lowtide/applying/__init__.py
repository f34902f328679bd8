"""`lowtide.apply`: the only part of Lowtide that changes a model. It hands back what undoes it."""

from __future__ import annotations

from lowtide.applying.applied import Applied, applied_to, apply
from lowtide.applying.report import Report

__all__ = ["Applied", "Report", "applied_to", "apply"]
