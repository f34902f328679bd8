"""A new result beside the stored one. What must repeat and does not is a failure; what is noisy has a band."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from bench.figures import EXACT

if TYPE_CHECKING:
    from bench.figures import Figure, Result

BAND = 0.10
"""Ratios this close, relative to the stored one, count as the same; so do ratios whose quartiles overlap."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """`is_failure`: something that is counted came out otherwise."""

    place: str
    was: str
    now: str
    is_failure: bool

    def __str__(self) -> str:
        return f"{self.place}: {self.was} -> {self.now}"


def differences(before: Result, now: Result) -> list[Difference]:
    """Everything that is not as it was: settings, rows, figures, and who was left out."""
    found = []
    if before.setting != now.setting:
        found.append(Difference("setting", str(before.setting), str(now.setting), is_failure=True))
    for name in {**before.rows, **now.rows}:
        old, new = before.rows.get(name, {}), now.rows.get(name, {})
        for figure in {**old, **new}:
            found += _difference(f"{name}, {figure}", old.get(figure), new.get(figure))
    return found


def _difference(place: str, before: Figure | None, now: Figure | None) -> list[Difference]:
    if before is not None and now is not None and _is_same(before, now):
        return []
    is_exact = any(figure is not None and figure.kind in EXACT for figure in (before, now))
    return [Difference(place, _shown(before), _shown(now), is_failure=is_exact)]


def _is_same(before: Figure, now: Figure) -> bool:
    if before.kind != now.kind:
        return False
    return before.kind == "seconds" or before.value == now.value or _is_noise(before, now)


def _is_noise(before: Figure, now: Figure) -> bool:
    """Whether two values that differ may be the same thing, measured twice."""
    if before.kind in EXACT:
        return False
    return _overlap(before, now) or abs(now.value - before.value) <= BAND * before.value


def _overlap(before: Figure, now: Figure) -> bool:
    if before.low is None or now.low is None:
        return False
    return before.low <= now.high and now.low <= before.high


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return "not there"
    return f"{figure.value:.3f}" if figure.kind == "ratio" else str(figure.value)
