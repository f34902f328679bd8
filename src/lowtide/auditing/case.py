"""One set-up of one model, with everything that its checks look at; what is expensive is run when first asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from lowtide.auditing.comparing import compare, error_beyond_rounding, errors_of, is_nothing, largest_of
from lowtide.auditing.names import named_parameters
from lowtide.auditing.parallel import averaged, is_parallel
from lowtide.auditing.plain import copy_of, without_torch_checkpoint
from lowtide.auditing.step import Observation, observe
from lowtide.auditing.verdicts import Check, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from lowtide.auditing.comparing import Comparison
    from lowtide.auditing.setups import Installed, Setup
    from lowtide.auditing.step import Experiment


class Reference:
    """The plain model: run twice, and in double precision if a doubt asks for it."""

    def __init__(self, model: nn.Module, experiment: Experiment, *, on_all_ranks: bool = False) -> None:
        self.model = model
        self.experiment = experiment
        self._with_only: dict[frozenset[str], Observation] = {}
        self._zeros: dict[frozenset[str] | None, set[str]] = {}
        self.first = self.observe(model, experiment)
        again = self.observe(model, experiment).gradients
        self.own_errors = errors_of(self.first.gradients, again)
        self.own_error = error_beyond_rounding(self.first.gradients, again)
        self._of_other_ranks: set[str] = set()
        if on_all_ranks:
            self._average()

    def _average(self) -> None:
        own, average = self.first.gradients, averaged(self.first.gradients)
        self._of_other_ranks = {name for name in own if is_nothing(own[name]) and not is_nothing(average[name])}
        self.first.gradients = average

    @staticmethod
    def observe(model: nn.Module, experiment: Experiment) -> Observation:
        with without_torch_checkpoint(model):
            return observe(model, experiment)

    @property
    def is_vacuous(self) -> bool:
        return largest_of(self.first.gradients) == 0.0 or not bool(torch.isfinite(self.first.loss).all())

    def with_only(self, names: frozenset[str]) -> Observation:
        """The plain model with these weights trained and everything else frozen."""
        if names not in self._with_only:
            with only_trained(self.model, names):
                self._with_only[names] = self.observe(self.model, self.experiment)
        return self._with_only[names]

    def zero_by_mathematics(self, trained: frozenset[str] | None = None) -> set[str]:
        """Parameters whose gradient vanishes in double precision: what single precision computes is rounding. Of all
        that train in the model, or with `trained` of these, everything else being frozen.

        Empty if the model cannot run so: then the noise floor alone decides. A parameter without a gradient is not
        among them: what is frozen or unused has no rounding either. And a rank whose batch leaves a parameter out says
        nothing about it: others have the gradient.
        """
        if trained not in self._zeros:
            self._zeros[trained] = self._find_zeros(trained)
        return self._zeros[trained]

    def _find_zeros(self, trained: frozenset[str] | None) -> set[str]:
        try:
            twin = copy_of(self.model).double()
            experiment = dataclasses.replace(self.experiment, batch=_doubled(self.experiment.batch))
            with contextlib.nullcontext() if trained is None else only_trained(twin, trained):
                gradients = self.observe(twin, experiment).gradients
        except (RuntimeError, ValueError, TypeError):  # an operator without a double kernel, a hard-coded dtype
            return set()
        floor = 1e-11 * largest_of(gradients)
        zeros = {name for name, gradient in gradients.items() if _vanishes(gradient, floor)}
        return zeros - self._of_other_ranks


@dataclasses.dataclass
class Case:
    """A set-up, the plain reference, and what was seen."""

    setup: Setup
    source: nn.Module
    reference: Reference
    expects_offload: bool

    @property
    def experiment(self) -> Experiment:
        return self.reference.experiment

    @property
    def is_parallel(self) -> bool:
        return is_parallel(self.source)

    @functools.cached_property
    def seen(self) -> Observation:
        return observe(self.install().model, self.experiment)

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
        return {name for name, calls in self.seen.backward_calls.items() if calls > before[name]}

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

    def recomputes_too(self, name: str, **evidence: Any) -> Check:
        """The verdict of a check that needs a reference in which nothing is run again."""
        return self.check(
            name,
            Verdict.INCONCLUSIVE,
            "the reference runs its blocks again in backward, too: there is nothing plain to compare with",
            remedy="pass reference=, a plain twin with the same weights, or a function that makes a copy plain",
            **evidence,
        )

    def check(self, name: str, verdict: Verdict, summary: str, *, remedy: str | None = None, **evidence: Any) -> Check:
        return Check(
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


def _vanishes(gradient: Tensor | None, floor: float) -> bool:
    if gradient is None:
        return False
    return not gradient.numel() or bool(gradient.abs().max() <= floor)


def _doubled(batch: Any) -> Any:
    from torch.utils import _pytree as pytree

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return pytree.tree_map(double, batch)


@contextlib.contextmanager
def only_trained(model: nn.Module, names: frozenset[str]) -> Iterator[None]:
    """These parameters need gradients, no others do."""
    before = [(parameter, parameter.requires_grad) for _, parameter in named_parameters(model)]
    for name, parameter in named_parameters(model):
        if parameter.is_floating_point():
            parameter.requires_grad_(name in names)
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
