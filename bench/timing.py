"""Times as ratios of neighbours: in every round each candidate runs once, so that what the machine does hits all.

Time is the process's own on the CPU: with one thread that is what a step takes, less what other processes took.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bench.figures import ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.figures import Figure


def interleaved(runs: dict[str, Callable[[], object]], *, against: str, rounds: int) -> dict[str, Figure]:
    """Return, by name, the time divided by that of `against` in the same round.

    A first round is not counted, and each round starts with the next run.
    """
    names = list(runs)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(_seconds(runs[name]))
    return {
        name: ratio([one / base for one, base in zip(times[1:], taken[against][1:], strict=True)])
        for name, times in taken.items()
    }


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start
