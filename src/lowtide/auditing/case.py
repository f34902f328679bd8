"""One set-up of one model beside the reference: what every check is given.

`Case.run` runs the experiment under the set-up, once. Checks that need more runs (switched on twice, switched off, on
a frozen base) install the set-up again with `Case.install` and observe those runs themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from lowtide.auditing.reference import Reference, deep_copy, is_ddp
from lowtide.auditing.result import CheckResult, Verdict
from lowtide.auditing.step import Observation, observe

if TYPE_CHECKING:
    from torch import nn

    from lowtide.auditing.grades import Grade
    from lowtide.auditing.setups import Installed, Setup
    from lowtide.auditing.step import Experiment


@dataclasses.dataclass
class Case:
    """A set-up, the model to set up, and the reference to compare with."""

    setup: Setup
    source: nn.Module
    reference: Reference
    expects_offload: bool
    _observation: Observation | None = dataclasses.field(default=None, init=False)

    def run(self) -> Observation:
        """Run the step under this set-up, once; later calls return what the first one observed."""
        if self._observation is None:
            self._observation = observe(self.install().model, self.experiment)
        return self._observation

    @property
    def has_run(self) -> bool:
        """Whether `run` has succeeded; a set-up that raises has not."""
        return self._observation is not None

    def install(self) -> Installed:
        """Set up a fresh copy of the model, or take the model itself if it is judged as it is."""
        model = self.source if self.setup.configure is None else deep_copy(self.source)
        return self.setup.install(model)

    @property
    def experiment(self) -> Experiment:
        return self.reference.experiment

    @property
    def plain(self) -> Observation:
        """The reference's run."""
        return self.reference.first

    @property
    def is_ddp(self) -> bool:
        return is_ddp(self.source)

    @property
    def blocks(self) -> list[str]:
        return self.experiment.blocks

    @functools.cached_property
    def recomputed(self) -> set[str]:
        """Modules that ran in backward more often than in the reference's."""
        before = self.plain.backward_calls
        return {name for name, calls in self.run().backward_calls.items() if calls > before[name]}

    @functools.cached_property
    def recomputes_no_more_than_reference(self) -> bool:
        """Whether the reference itself recomputes, and no block runs more often here: both would show the same."""
        by_itself = any(self.plain.backward_calls[block] for block in self.blocks)
        return by_itself and not any(block in self.recomputed for block in self.blocks)

    @property
    def is_the_reference(self) -> bool:
        """Whether, on top of that, nothing was done to the model: comparing would compare a run with its rerun."""
        return self.setup.configure is None and self.recomputes_no_more_than_reference

    def result(
        self,
        name: str,
        verdict: Verdict,
        summary: str,
        *,
        remedy: str | None = None,
        escalated: Grade | None = None,
        **evidence: Any,
    ) -> CheckResult:
        """Return the result of a check on this case; `escalated` if it is worse than the check's usual failure."""
        return CheckResult(
            name=name,
            mode=self.setup.name,
            verdict=verdict,
            summary=summary,
            evidence=evidence,
            remedy=remedy,
            escalated=escalated,
        )

    def without_plain_reference(self, name: str, **evidence: Any) -> CheckResult:
        """Return the result of a check that needs a reference in which nothing is recomputed."""
        return self.result(
            name,
            Verdict.INCONCLUSIVE,
            "the reference recomputes its blocks in backward, too: there is no plain run to compare with",
            remedy="pass reference=, a plain twin with the same weights or a function that makes a copy plain",
            **evidence,
        )
