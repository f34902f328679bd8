"""Proves on the accelerator at hand what Lowtide claims, and leaves a record that can be sent and published.

    Bench        the device, its data sheet and the sizes of work that suit it       (bench.py)
    Stage        a question, answered by rows: right, frees, overlaps, plans, ...    (a module each)
    Findings     a stage's rows: what one raises, and what time did not allow        (findings.py)
    Row          one thing that was measured, with a figure, a verdict and a grade   (record.py)
    Thresholds   the limits between a pass and a failure, all in one place           (thresholds.py)
    Record       all stages and the machine, as JSON, text and a page                (record.py, report.py, page.py)

`runner.run` runs the stages in order. Each can fail: the tests break the engine in a way for each stage, which that
stage finds, and no other.
"""

from __future__ import annotations

from lowtide.selftest.record import Record, Row, StageResult, read_record
from lowtide.selftest.runner import STAGES, run

__all__ = ["STAGES", "Record", "Row", "StageResult", "read_record", "run"]
