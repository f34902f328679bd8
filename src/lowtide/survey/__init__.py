"""A survey of the zoo: every architecture of the installed transformers, audited one process at a time."""

from __future__ import annotations

from lowtide.survey.one import Engine, survey_one
from lowtide.survey.records import Record, read_records
from lowtide.survey.run import run_survey

__all__ = ["Engine", "Record", "read_records", "run_survey", "survey_one"]
