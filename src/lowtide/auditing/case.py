"""One set-up of one model, with everything that its checks look at; what is expensive is run when first asked for."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from lowtide.auditing.comparison import compare
from lowtide.auditing.reference import Reference, copy_of, is_parallel
from lowtide.auditing.report import CheckResult, Verdict
from lowtide.auditing.step import Observation, observe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from lowtide.auditing.comparison import Comparison
    from lowtide.auditing.setups import Installed, Setup
    from lowtide.auditing.step import Experiment


@dataclasses.dataclass
class Case:
    """A set-up, the plain reference, and what was seen."""

    setup: Setup
    source: nn.Module
    reference: Reference
    expects_offload: bool
    _observation: Observation | None = dataclasses.field(default=None, init=False)

    @property
    def experiment(self) -> Experiment:
        return self.reference.experiment

    @property
    def is_parallel(self) -> bool:
        return is_parallel(self.source)

    def run(self) -> Observation:
        """Run the step under this set-up, once; later calls return what the first one observed."""
        if self._observation is None:
            self._observation = observe(self.install().model, self.experiment)
        return self._observation

    @property
    def plain(self) -> Observation:
        return self.reference.first

    def install(self) -> Installed:
        """The set-up in force: on a fresh copy, or on the model itself if it is judged as it is."""
        model = self.source if self.setup.configure is None else copy_of(self.source)
        return self.setup.install(model)

    @functools.cached_property
    def recomputed(self) -> set[str]:
        """Modules that ran in backward more often than in the reference's."""
        before = self.plain.backward_calls
        return {name for name, calls in self.run().backward_calls.items() if calls > before[name]}

    @functools.cached_property
    def repeats_the_reference(self) -> bool:
        """The reference recomputes by itself, and no block is run more often here: what it would show is in both."""
        by_itself = any(self.plain.backward_calls[block] for block in self.blocks())
        return by_itself and not any(block in self.recomputed for block in self.blocks())

    @property
    def is_the_reference(self) -> bool:
        """And nothing else was done to the model: to compare the two is to compare a run with its repetition."""
        return self.setup.configure is None and self.repeats_the_reference

    def blocks(self) -> Iterator[str]:
        return (block for stack in self.experiment.stacks for block in stack.blocks)

    def compare(self, seen: Observation) -> tuple[Comparison, list[str]]:
        """Against the reference; and the names that were acquitted because their true gradient is zero."""
        return judged(self.reference, self.plain, seen)

    def recomputes_too(self, name: str, **evidence: Any) -> CheckResult:
        """The verdict of a check that needs a reference in which nothing is run again."""
        return self.check(
            name,
            Verdict.INCONCLUSIVE,
            "the reference runs its blocks again in backward, too: there is nothing plain to compare with",
            remedy="pass reference=, a plain twin with the same weights, or a function that makes a copy plain",
            **evidence,
        )

    def check(
        self, name: str, verdict: Verdict, summary: str, *, remedy: str | None = None, **evidence: Any
    ) -> CheckResult:
        return CheckResult(
            name=name, mode=self.setup.name, verdict=verdict, summary=summary, evidence=evidence, remedy=remedy
        )


def judged(
    reference: Reference, expected: Observation, seen: Observation, trained: frozenset[str] | None = None
) -> tuple[Comparison, list[str]]:
    """Against what is expected; with `trained`, of runs in which only these weights train."""
    comparison = compare(expected.gradients, seen.gradients, reference.own_errors)
    suspects = comparison.suspects
    if not suspects:
        return comparison, []
    zeros = sorted(set(suspects) & reference.zero_by_mathematics(trained))
    comparison.acquit(set(zeros))
    return comparison, zeros
