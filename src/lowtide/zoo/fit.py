"""A batch for a model that is there already, of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.zoo.find import CannotBuildError, find_batch
from lowtide.zoo.parts import make_batch
from lowtide.zoo.scene import Scene
from lowtide.zoo.surroundings import own_randomness, quiet

if TYPE_CHECKING:
    from torch import nn


def fitting_batch(model: nn.Module, seed: int = 0) -> dict[str, Any]:
    """The arguments of one forward, made of the model's configuration alone."""
    reasons: list[str] = []
    with quiet(), own_randomness(seed):
        best = find_batch(Scene(model, model.config), reasons)
    if best is None:
        raise CannotBuildError(type(model).__name__, reasons)
    return make_batch(best[1], seed)
