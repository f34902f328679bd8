"""A batch for a model that is there already, of any size: the first one that trains all of it, or the best."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from lowtide.zoo.batches import candidates
from lowtide.zoo.find import MOST_BATCHES, CannotBuildError
from lowtide.zoo.parts import make_batch
from lowtide.zoo.scene import Scene, in_short
from lowtide.zoo.surroundings import own_randomness, quiet
from lowtide.zoo.trial import try_batch

if TYPE_CHECKING:
    from torch import nn


def fitting_batch(model: nn.Module, seed: int = 0) -> dict[str, Any]:
    """The arguments of one forward, made of the model's configuration alone."""
    reasons = []
    best: tuple[float, Any] | None = None
    with quiet(), own_randomness(seed):
        for recipe in itertools.islice(candidates(Scene(model, model.config)), MOST_BATCHES):
            try:
                share = try_batch(model, make_batch(recipe, seed)).trained_share
            except Exception as error:  # noqa: BLE001  a batch is a guess, and what it breaks is recorded
                reasons.append(f"{', '.join(recipe)}: {in_short(error)}")
                continue
            if best is None or share > best[0]:
                best = (share, recipe)
            if share == 1.0:
                break
    if best is None:
        raise CannotBuildError(type(model).__name__, reasons)
    return make_batch(best[1], seed)
