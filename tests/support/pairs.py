"""A covering subset of cases: every pair of values that occurs in some case occurs in a chosen one."""

from __future__ import annotations

import itertools

import pytest


def marked(cases: list[tuple], *also: tuple) -> list:
    """All cases, as parameters of a test: those that are neither in a covering subset nor in `also` are slow."""
    quick = [*covering(cases), *also]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def covering(cases: list[tuple]) -> list[tuple]:
    """Greedy and always the same."""
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _pairs(case)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: tuple) -> set[tuple]:
    return set(itertools.combinations(enumerate(case), 2))
