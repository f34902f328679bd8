"""Builds a tiny model for a seed, and runs a smoke step on it.

Some models draw from the random generators of NumPy and Python, not only from torch's. All three are set from the seed
and put back afterwards, so that a tiny model does not depend on its caller, nor its caller on it. Tiny models are on
the CPU, so the generators of devices are left alone. Warnings and log messages of transformers are suppressed on the
way: odd configurations cause many.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.errors import NoGradientError
from lowtide.objective import objective
from lowtide.randomness import seeded
from lowtide_zoo.classes import configurations_in, model_classes
from lowtide_zoo.model_inputs import Recipe, make_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

# A weight that starts at zero hides the gradients of what it is multiplied with. This much noise on every parameter
# makes them visible, and is too little to upset a model.
_PERTURBATION = 0.02


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """A tiny model of one architecture, and a batch that trains it, for any seed."""

    model_type: str
    model_class: str
    config: Any
    """The shrunken configuration. Every model that is built gets its own copy."""
    recipe: Recipe = dataclasses.field(repr=False)
    """The description that batches are made from."""

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model in train mode, without caches; the same seed gives the same weights."""
        cls = next(cls for cls in model_classes(self.model_type) if cls.__name__ == self.model_class)
        return build_model(cls, self.config, seed)

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """Make the arguments of one forward; seeds change values, but not shapes and placeholders."""
        return make_batch(self.recipe, seed)


def build_model(cls: type[nn.Module], config: Any, seed: int) -> nn.Module:
    """Build a model in train mode from a copy of a configuration, with caches off and its parameters perturbed."""
    config = copy.deepcopy(config)
    for part in configurations_in(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = True  # the router's auxiliary loss becomes part of the loss
    with quiet(), seeded(seed):
        model = cls(config)
        _perturb(model, seed)
    return model.train()


@torch.no_grad()
def _perturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(noise, alpha=_PERTURBATION)


class _UselessError(Exception):  # stored records of surveys quote this name
    """The batch runs, but trains nothing, or not with finite numbers."""


@dataclasses.dataclass(frozen=True, order=True)
class Outcome:
    """What a batch does for a model. The larger, the better."""

    trained_share: float
    """The share of the stacks of layers that get gradients."""
    has_loss: bool
    """Whether the model returned a loss."""


def smoke_step(model: nn.Module, batch: dict[str, Any]) -> Outcome:
    """Run the model forward and backward once. Whatever goes wrong is raised."""
    model.zero_grad(set_to_none=True)
    with quiet(), seeded(0):
        output = model(**batch)
        loss = _loss(output)
        torch.autograd.backward(loss)
    _check_gradients(model, loss)
    stacks = list(_stacks(model))
    trained = sum(any(_is_trained(p) for p in stack.parameters()) for stack in stacks)
    model.zero_grad(set_to_none=True)
    return Outcome(trained / len(stacks) if stacks else 1.0, _has_loss(output))


def _loss(output: Any) -> torch.Tensor:
    try:
        return objective(output, None)
    except NoGradientError:
        raise _UselessError("no output depends on a parameter") from None


def _has_loss(output: Any) -> bool:
    """Tell whether the model returned a loss by that name; a single number without a name does not count."""
    loss = getattr(output, "loss", None)
    return isinstance(loss, torch.Tensor) and loss.requires_grad


def _check_gradients(model: nn.Module, loss: torch.Tensor) -> None:
    if not torch.isfinite(loss):
        raise _UselessError(f"the loss is {loss.item()}")
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise _UselessError("a gradient is not finite")
    if not any(bool(gradient.any()) for gradient in gradients):
        raise _UselessError("all gradients are zero")


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the lists of layers that hold trainable parameters."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(p.requires_grad for p in module.parameters()):
            yield module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, and the log messages of transformers, inside."""
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
