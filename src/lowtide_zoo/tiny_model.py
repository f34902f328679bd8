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
        own = _own_loss(output)
        loss = own if own is not None else _loss_of_tensors(output)
        torch.autograd.backward(loss)
    _check_gradients(model, loss)
    stacks = list(_stacks(model))
    trained = sum(any(_is_trained(p) for p in stack.parameters()) for stack in stacks)
    model.zero_grad(set_to_none=True)
    return Outcome(trained / len(stacks) if stacks else 1.0, own is not None)


# `lowtide.objective` is not used here: it decides differently. The experts of qwen3_omni_moe_talker_text are left
# uninitialised, and of 40 builds it found a gradient that is not finite in 16, this loss in 4. The batches that are
# found, and with them the stored records, must stay the same.
def _own_loss(output: Any) -> torch.Tensor | None:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    return None


def _loss_of_tensors(output: Any) -> torch.Tensor:
    """Weigh all finite numbers at random: a plain mean would cancel in normalised outputs."""
    generator = torch.Generator().manual_seed(0)
    outputs = (tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.is_floating_point())
    finite = [numbers for numbers in (tensor[torch.isfinite(tensor)] for tensor in outputs) if numbers.numel()]
    terms = [(numbers * torch.randn(numbers.shape, generator=generator)).mean() for numbers in finite]
    if not terms:
        raise _UselessError("no output depends on a parameter")
    return torch.stack(terms).sum()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        yield from _tensors(vars(output))


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
