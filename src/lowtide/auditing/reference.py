"""The reference: a copy of the model in which nothing is recomputed.

A copy with its own checkpointing flag off, run while torch's `checkpoint` simply calls its function: so also models
whose code calls it themselves, or that lie in torch's checkpoint wrappers, have a plain run to be compared with. The
replacement holds for the whole process, for as long as the run takes, and every name is put back.

Models under DDP: the reference is the plain model on every rank's own batch, its gradients averaged over ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide._torch import pytree
from lowtide.auditing.comparison import checksum, error_beyond_rounding, errors_of, is_nothing, largest_of
from lowtide.auditing.setups import disable
from lowtide.auditing.step import Observation, observe
from lowtide.errors import CannotAuditError
from lowtide.modules import named_parameters, unwrap_ddp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

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


def _vanishes(gradient: Tensor | None, floor: float) -> bool:
    if gradient is None:
        return False
    return not gradient.numel() or bool(gradient.abs().max() <= floor)


def _doubled(batch: Any) -> Any:
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


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy with weights of its own."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise CannotAuditError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and the audit compares "
            "copies: pass reference=, a second model with the same weights, and set the model up yourself instead of "
            "with configure="
        ) from error
    for parameter in twin.parameters():
        if not parameter.is_leaf:  # TorchScript copies by an operation, whose gradients go to the original
            parameter.detach_().requires_grad_()
    return twin


def reference_of(model: nn.Module, reference: nn.Module | Callable[[nn.Module], Any] | None) -> nn.Module:
    """A plain twin: the one given, or a copy, made plain by the function given or by its own flag."""
    if isinstance(reference, nn.Module):
        return reference
    twin = copy_of(unwrap_ddp(model))
    if reference is not None:
        made = reference(twin)
        return made if isinstance(made, nn.Module) else twin
    disable(twin)
    return twin


@contextlib.contextmanager
def without_torch_checkpoint(model: nn.Module) -> Iterator[None]:
    """Torch's checkpoint calls its function and does nothing else: by any name, and where the model's modules keep it,
    or a partial of it as torch's CheckpointWrapper does, to which no name leads."""
    original = torch.utils.checkpoint.checkpoint
    named = set(inspect.signature(original).parameters) - {"function", "args", "kwargs"}
    options = named | {"preserve_rng_state"}  # torch takes it out of its keywords

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    kept = list(_kept(original, model))
    for holder, name in [*_holders(original), *((module, name) for module, name, _ in kept)]:
        setattr(holder, name, call)
    try:
        yield
    finally:
        for module, name, held in kept:
            setattr(module, name, held)
        for holder, name in _holders(call):
            setattr(holder, name, original)


def _kept(function: Callable[..., Any], model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name, held in vars(module).items():
            if held is function or (isinstance(held, functools.partial) and held.func is function):
                yield module, name, held


def _holders(value: Any) -> list[tuple[Any, str]]:
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, held in list(getattr(module, "__dict__", {}).items())
        if held is value
    ]


def is_parallel(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def averaged(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """What DDP should make of each rank's gradients. Where one rank has none, the others' count as they are: it adds
    zeros of their kind, on the device of its own gradients, because all ranks must go to the same backend."""
    device = next((gradient.device for gradient in gradients.values() if gradient is not None), torch.device("cpu"))
    own_kinds = {name: (tuple(g.shape), g.dtype) for name, g in gradients.items() if g is not None}
    kinds = {name: kind for others in _everybodys(own_kinds) for name, kind in others.items()}
    found: dict[str, Tensor | None] = dict.fromkeys(gradients)
    for name in (name for name in gradients if name in kinds):
        own, (shape, dtype) = gradients[name], kinds[name]
        total = torch.zeros(shape, dtype=dtype, device=device) if own is None else own.clone()
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


def differ_between_ranks(gradients: dict[str, Tensor | None]) -> list[str]:
    """Names of the gradients that are not the same bits on every rank."""
    sums = {name: None if gradient is None else checksum(gradient) for name, gradient in gradients.items()}
    everybody = _everybodys(sums)
    return [name for name in sums if len({others[name] for others in everybody}) > 1]


def _everybodys(own: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks' own ones, in their order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered
