"""What trying out models would otherwise leave behind or depend on: random states, warnings, log messages.

Some models draw from the random generators of numpy and Python, not only from torch's. All three are set from the seed
and put back afterwards, so that a tiny model does not depend on its caller, nor its caller on it. Tiny models are on
the CPU, so other devices' generators are left alone.

What the zoo hands out: a shrunken configuration, and with it the model and the batch for any seed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch

from lowtide.randomness import seeded
from lowtide_zoo.classes import configurations_in, model_classes
from lowtide_zoo.model_inputs import Recipe, make_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log messages of transformers inside."""
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# Weights that start at zero hide gradients: those of whatever they are multiplied with. This much noise on every
# parameter is enough to see them, and too little to upset a model.
PERTURBATION = 0.02


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """A tiny model of one architecture and a batch that trains it."""

    model_type: str
    model_class: str
    config: Any
    """The shrunken configuration. Every model built has its own copy."""
    recipe: Recipe = dataclasses.field(repr=False)
    """How its batch is made."""

    def build(self, seed: int = 0) -> nn.Module:
        """The model in train mode, without caches; the same weights for the same seed."""
        cls = next(cls for cls in model_classes(self.model_type) if cls.__name__ == self.model_class)
        return build_model(cls, self.config, seed)

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """The arguments of one forward; other values, but the same shapes and placeholders, for another seed."""
        return make_batch(self.recipe, seed)


def build_model(cls: type[nn.Module], config: Any, seed: int) -> nn.Module:
    """A model in train mode, its parameters perturbed, from a copy of a configuration without caches."""
    config = copy.deepcopy(config)
    for part in configurations_in(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = True  # the router's own loss is part of the loss
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
            parameter.add_(noise, alpha=PERTURBATION)
