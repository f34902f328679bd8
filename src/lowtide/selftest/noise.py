"""Tells an engine's error from what the plain model does by itself: its gradients may differ from run to run.

Kernels that add with atomic operations, such as attention's backward and `index_add` on a GPU, sum in a different order
each time. One rerun may happen to agree, so the plain model runs several times, and more often before anything is
called wrong. A gradient that differs is then excused only if the same gradient of the plain model differs by itself,
about as much. Where the plain model differs by a lot, nothing can be told.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from lowtide.auditing.comparison import compare, error_beyond_rounding, relative_errors
from lowtide.auditing.result import Verdict, listed
from lowtide.selftest.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.auditing.comparison import Gradients

FEW, MANY = 3, 12
"""How many reruns there are at first, and before anything is called wrong."""

NOISY = 1e-2
"""A plain model whose gradients differ by more than this from run to run proves nothing, as in the audit."""

OWN_NOISE = "within the plain model's own noise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """What was found about one run's gradients."""

    verdict: Verdict
    summary: str
    identical: bool
    largest_error: float


class PlainRuns:
    """Runs of the plain model: the gradients of the first, and by how much each differs in the others."""

    def __init__(self, run: Callable[[], Gradients], reruns: int = FEW) -> None:
        self._run = run
        self._count = 0
        self.first = run()
        self.errors: dict[str, float] = {}
        """The largest relative error of each gradient in the reruns."""
        self.noise = 0.0
        """The largest of these errors among gradients that are more than rounding."""
        self.rerun(reruns)

    def rerun(self, count: int) -> None:
        """Run the plain model until it has been run again so often."""
        while self._count < count:
            found = self._run()
            self._count += 1
            errors = relative_errors(self.first, found)
            self.errors = {name: max(error, self.errors.get(name, 0.0)) for name, error in errors.items()}
            self.noise = max(self.noise, error_beyond_rounding(self.first, found))

    def unexplained(self, errors: dict[str, float]) -> dict[str, float]:
        """Return which errors the plain model does not make by itself, after as many reruns as it takes to say so."""
        for reruns in (FEW, MANY):
            self.rerun(reruns)
            excused = {name: THRESHOLDS.own_noise * error for name, error in self.errors.items()}
            beyond = {name: error for name, error in errors.items() if error > excused.get(name, 0.0)}
            if not beyond:
                break
        return beyond

    def judge(self, found: Gradients, *, rounds: bool = False) -> Judgement:
        """Judge an engine's gradients. If it `rounds` differently, as tiles do, the audit's tolerances hold."""
        comparison = compare(self.first, found, self.errors)
        if comparison.suspects and self._count < MANY:
            self.rerun(MANY)
            comparison = compare(self.first, found, self.errors)
        largest = comparison.largest_error
        if comparison.identical:
            verdict, said = Verdict.PASS, "bit-identical"
        elif self.noise > NOISY:
            verdict, said = Verdict.INCONCLUSIVE, f"the plain model's own gradients differ by {self.noise:.1e}"
        elif comparison.suspects:
            verdict = Verdict.FAIL
            said = f"{len(comparison.suspects)} gradients are wrong: {listed(comparison.suspects)}"
        elif rounds:
            verdict, said = Verdict.PASS, f"equal within {largest:.1e}"
        elif beyond := self.unexplained(self._errors_of(found, comparison.noise)):
            verdict = Verdict.FAIL
            said = f"gradients differ by {largest:.1e}, where nothing may: {listed(list(beyond))}"
        else:
            verdict, said = Verdict.PASS, f"equal within {largest:.1e}, {OWN_NOISE}"
        return Judgement(verdict=verdict, summary=said, identical=comparison.identical, largest_error=largest)

    def _errors_of(self, found: Gradients, names: list[str]) -> dict[str, float]:
        """Return the relative errors of these gradients; infinite where the plain model's is zero."""
        errors = relative_errors(self.first, found)
        return {name: errors.get(name, math.inf) for name in names}
