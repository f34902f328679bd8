"""Proves that checkpointing is active and right, for any model and anybody's set-up.

`audit` runs one training step of the plain model and one under each set-up, and compares the two:

    Experiment   the batch, the loss and the seed: what is run               (step.py)
    Observation  everything that was seen in one run                         (step.py, by the instruments)
    Reference    the plain model: its observation, and how noisy it is       (reference.py)
    Case         one set-up: its observation beside the reference's          (case.py)
    CheckResult  what one check says about a case; an AuditReport has all    (checks/, result.py)
    Grade        how bad a failure is; a report says it all in a sentence    (grades.py, conclusion.py)

Nothing here imports Lowtide's own engine: it is judged like everybody else's. A "block" is what `stacks` finds by
structure, whatever an engine calls a region.
"""

from __future__ import annotations

from lowtide.auditing.audit import CHECKS, audit
from lowtide.auditing.grades import Grade
from lowtide.auditing.report import AuditReport
from lowtide.auditing.result import CheckResult, Verdict
from lowtide.errors import CannotAuditError

__all__ = ["CHECKS", "AuditReport", "CannotAuditError", "CheckResult", "Grade", "Verdict", "audit"]
