"""The engine behind `lowtide.apply`: the only part of Lowtide that changes a model. Its handle undoes the change."""

from __future__ import annotations

from lowtide.applying.applied import Applied, applied_to, apply_policy
from lowtide.applying.report import Report

__all__ = ["Applied", "Report", "applied_to", "apply_policy"]
