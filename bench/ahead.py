"""Where a peer is ahead of us, found in the figures: nobody has to notice it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.figures import EXACT, FINE
from bench.tables import brief

if TYPE_CHECKING:
    from bench.figures import Figure, Result
    from bench.section import Rivalry, Section

MARGIN = 0.05
"""A noisy figure must be less by more than this."""


def ahead(section: Section, result: Result) -> list[str]:
    """A line for each peer and row of ours that it beats, with the figures."""
    return [
        f"{name}, beside {rivalry.ours}: {'; '.join(better)}"
        for rivalry in section.RIVALRIES
        for name in rivalry.theirs
        if name in result.rows and (better := _better(section, result, rivalry, name))
    ]


def _better(section: Section, result: Result, rivalry: Rivalry, name: str) -> list[str]:
    ours, theirs = result.rows[rivalry.ours], result.rows[name]
    return [
        f"{section.COLUMNS[figure]} {brief(theirs[figure])} against {brief(ours[figure])}"
        for figure in rivalry.figures
        if figure in ours and figure in theirs and _is_less(theirs[figure], ours[figure])
        if theirs.get(rivalry.if_right.get(figure, "")) is None or theirs[rivalry.if_right[figure]].value in FINE
    ]


def _is_less(theirs: Figure, ours: Figure) -> bool:
    if ours.kind in EXACT:
        return theirs.value < ours.value
    return ours.kind != "seconds" and theirs.value < ours.value * (1 - MARGIN)
