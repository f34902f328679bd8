"""The reference: a copy of the model in which nothing is recomputed, run twice.

Its own checkpointing flag is off, and while it runs torch's `checkpoint` simply calls its function. So models whose
code calls it themselves, or that lie in torch's checkpoint wrappers, have a plain run to be compared with, too. The
replacement holds for the whole process, for as long as the run takes, and every name is put back.

Under DDP, the reference is the plain model on every rank's own batch, with its gradients averaged over the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.auditing.comparison import (
    as_near,
    as_rounded,
    checksum,
    compare,
    error_beyond_rounding,
    is_none_or_zero,
    largest_gradient,
    relative_errors,
)
from lowtide.auditing.dependence import find_dependence
from lowtide.auditing.precision import InDouble, in_double, nudge
from lowtide.auditing.setups import disable_checkpointing
from lowtide.auditing.step import Observation, observe
from lowtide.errors import CannotAuditError
from lowtide.modules import named_parameters, unwrap_ddp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from lowtide.auditing.comparison import Comparison, Gradients
    from lowtide.auditing.dependence import Dependence
    from lowtide.auditing.step import Experiment

_NUDGES = 2


class Reference:
    """What the plain model does: observed, run again to see its noise, and in double precision to settle a doubt."""

    def __init__(self, model: nn.Module, experiment: Experiment, *, on_all_ranks: bool = False) -> None:
        self.model = model
        self.experiment = experiment
        self._trained_only: dict[frozenset[str], Observation] = {}
        self._in_double: dict[frozenset[str] | None, Gradients | None] = {}
        self._rounding: dict[frozenset[str] | None, dict[str, float]] = {}
        self.first = self._observe(model, experiment)
        rerun = self._observe(model, experiment).gradients
        self.rerun_errors = relative_errors(self.first.gradients, rerun)
        self.rerun_error = error_beyond_rounding(self.first.gradients, rerun)
        self._from_other_ranks: set[str] = set()
        """Parameters that get their gradient from other ranks' batches alone."""
        self._is_average = on_all_ranks
        if on_all_ranks:
            self._average()

    @staticmethod
    def _observe(model: nn.Module, experiment: Experiment) -> Observation:
        with without_torch_checkpoint(model):
            return observe(model, experiment)

    def _average(self) -> None:
        own, average = self.first.gradients, average_over_ranks(self.first.gradients)
        self._from_other_ranks = {
            name for name in own if is_none_or_zero(own[name]) and not is_none_or_zero(average[name])
        }
        self.first.gradients = average

    @property
    def is_vacuous(self) -> bool:
        """Whether a comparison would prove nothing: all gradients are zero, or the loss is not finite."""
        return largest_gradient(self.first.gradients) == 0.0 or not bool(torch.isfinite(self.first.loss).all())

    def dependence_on(self, names: Sequence[str]) -> Dependence:
        """Find out on which of these parameters, which have no gradient, the loss depends all the same."""
        with without_torch_checkpoint(self.model):
            return find_dependence(self.model, self.experiment, names, lambda: deep_copy(self.model))

    def trained_only(self, names: frozenset[str]) -> Observation:
        """Observe the plain model with only these weights trained and everything else frozen; once for each set."""
        if names not in self._trained_only:
            with training_only(self.model, names):
                self._trained_only[names] = self._observe(self.model, self.experiment)
        return self._trained_only[names]

    def compare(self, seen: Observation, trained: frozenset[str] | None = None) -> tuple[Comparison, list[str]]:
        """Compare a run's gradients with the reference's; with `trained`, both are runs in which only these train.

        Also returns names that were acquitted because their true gradient is zero: what was compared is rounding.
        Others are acquitted because the run is as near to the true gradient as the reference, which is rounded, too. If
        the model cannot run in double precision, the plain model with other last bits in its weights takes the place of
        the true one: what moves a gradient as far is rounding that the model amplifies.
        """
        expected = self.first if trained is None else self.trained_only(trained)
        comparison = compare(expected.gradients, seen.gradients, self.rerun_errors)
        suspects = comparison.suspects
        if not suspects:
            return comparison, []
        zeros = sorted(set(suspects) & self.zero_by_mathematics(trained))
        comparison.acquit(set(zeros))
        true = None if self._is_average else self._gradients_in_double(trained)
        if true is not None:
            comparison.acquit(as_near(true, expected.gradients, seen.gradients, comparison.different))
        elif comparison.different and not self._is_average:
            comparison.acquit(as_rounded(self._errors_of_rounding(trained), comparison.different))
        return comparison, zeros

    def _errors_of_rounding(self, trained: frozenset[str] | None) -> dict[str, float]:
        """Return how far the last bits of the weights move the plain model's gradients: relative errors by name."""
        if trained not in self._rounding:
            expected = (self.first if trained is None else self.trained_only(trained)).gradients
            errors: dict[str, float] = {}
            for seed in range(_NUDGES):
                twin = deep_copy(self.model)
                nudge(twin, seed)
                with contextlib.nullcontext() if trained is None else training_only(twin, trained):
                    found = relative_errors(expected, self._observe(twin, self.experiment).gradients)
                errors = {name: max(error, errors.get(name, 0.0)) for name, error in found.items()}
            self._rounding[trained] = errors
        return self._rounding[trained]

    def zero_by_mathematics(self, trained: frozenset[str] | None = None) -> set[str]:
        """Return the parameters whose gradient vanishes in double precision: in single precision it is rounding.

        All parameters train as in the model, or with `trained` only these do, everything else being frozen.

        The set is empty if the model cannot run in double precision: then the noise floor alone decides. It leaves out
        parameters without a gradient, which have no rounding either, and those that this rank's batch does not reach:
        other ranks have their gradient.
        """
        gradients = self._gradients_in_double(trained)
        if gradients is None:
            return set()
        floor = 1e-11 * largest_gradient(gradients)
        zeros = {name for name, gradient in gradients.items() if _vanishes(gradient, floor)}
        return zeros - self._from_other_ranks

    def _gradients_in_double(self, trained: frozenset[str] | None) -> Gradients | None:
        """Return the plain model's gradients in double precision, or None if it cannot run in it."""
        if trained not in self._in_double:
            try:
                twin, experiment = in_double(deep_copy(self.model), self.experiment)
                with InDouble(), contextlib.nullcontext() if trained is None else training_only(twin, trained):
                    self._in_double[trained] = self._observe(twin, experiment).gradients
            except (RuntimeError, ValueError, TypeError):  # an operator without a double kernel, a hard-coded dtype
                self._in_double[trained] = None
        return self._in_double[trained]


def _vanishes(gradient: Tensor | None, floor: float) -> bool:
    if gradient is None:
        return False
    return not gradient.numel() or bool(gradient.abs().max() <= floor)


@contextlib.contextmanager
def training_only(model: nn.Module, names: frozenset[str]) -> Iterator[None]:
    """Let only these parameters require gradients; put every `requires_grad` back afterwards."""
    before = [(parameter, parameter.requires_grad) for _, parameter in named_parameters(model)]
    for name, parameter in named_parameters(model):
        if parameter.is_floating_point():
            parameter.requires_grad_(name in names)
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def plain_twin(model: nn.Module, reference: nn.Module | Callable[[nn.Module], Any] | None) -> nn.Module:
    """Return the model to compare with: the one given, or a copy, made plain by the function given or by its flag."""
    if isinstance(reference, nn.Module):
        return reference
    twin = deep_copy(unwrap_ddp(model))
    if reference is not None:
        made = reference(twin)
        return made if isinstance(made, nn.Module) else twin
    disable_checkpointing(twin)
    return twin


def deep_copy(model: nn.Module) -> nn.Module:
    """Copy a model with its weights."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise CannotAuditError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and the audit compares "
            "copies: pass reference=, a second model with the same weights, and set the model up yourself instead of "
            "with configure="
        ) from error
    for parameter in twin.parameters():
        if not parameter.is_leaf:  # TorchScript copies by an operation, whose gradients flow to the original
            parameter.detach_().requires_grad_()
    return twin


@contextlib.contextmanager
def without_torch_checkpoint(model: nn.Module) -> Iterator[None]:
    """Make torch's `checkpoint` call its function and do nothing else, wherever somebody holds it.

    It is replaced under every name in every imported module, and in the attributes of the model's modules: torch's
    CheckpointWrapper keeps a partial of it, which no module-level name leads to.
    """
    original = torch.utils.checkpoint.checkpoint
    named = set(inspect.signature(original).parameters) - {"function", "args", "kwargs"}
    options = named | {"preserve_rng_state"}  # torch takes it out of its keywords

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    attributes = list(_attributes_holding(original, model))
    for holder, name in [*_names_of(original), *((module, name) for module, name, _ in attributes)]:
        setattr(holder, name, call)
    try:
        yield
    finally:
        for module, name, held in attributes:
            setattr(module, name, held)
        for holder, name in _names_of(call):
            setattr(holder, name, original)


def _attributes_holding(function: Callable[..., Any], model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name, held in vars(module).items():
            if held is function or (isinstance(held, functools.partial) and held.func is function):
                yield module, name, held


def _names_of(value: Any) -> list[tuple[Any, str]]:
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, held in list(getattr(module, "__dict__", {}).items())
        if held is value
    ]


def is_ddp(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def average_over_ranks(gradients: Gradients) -> Gradients:
    """Return what DDP should make of each rank's gradients.

    A rank without a gradient adds zeros of the shape and dtype that other ranks have, on the device of its own
    gradients, because all ranks must use the same backend.
    """
    device = next((gradient.device for gradient in gradients.values() if gradient is not None), torch.device("cpu"))
    own = {name: (tuple(g.shape), g.dtype) for name, g in gradients.items() if g is not None}
    kinds = {name: kind for rank in _gather(own) for name, kind in rank.items()}
    averages: Gradients = dict.fromkeys(gradients)
    for name in (name for name in gradients if name in kinds):
        gradient, (shape, dtype) = gradients[name], kinds[name]
        total = torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient.clone()
        dist.all_reduce(total)
        averages[name] = total / dist.get_world_size()
    return averages


def differ_between_ranks(gradients: Gradients) -> list[str]:
    """Return the names of the gradients that are not the same bits on every rank."""
    sums = {name: None if gradient is None else checksum(gradient) for name, gradient in gradients.items()}
    everybody = _gather(sums)
    return [name for name in sums if len({rank[name] for rank in everybody}) > 1]


def _gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every rank's dict, in the order of the ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered
