"""Time series: the past, its observed points, and the future that is to be predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide.zoo.parts import Fixed, Integers, Noise, Part, Recipe
from lowtide.zoo.scene import ROWS, Scene, first

if TYPE_CHECKING:
    from collections.abc import Iterator


def series(scene: Scene) -> Iterator[Recipe]:
    """Layouts of time series, for models that take past values."""
    config = scene.config
    context = first(config, "context_length") or 32
    lags = max(first(config, "lags_sequence") or [0])
    channels = first(config, "num_input_channels", "input_size") or 1
    ahead = first(config, "prediction_length") or 4
    past = context + lags
    for values in ((ROWS, past), (ROWS, past, channels)):
        recipe: Recipe = {"past_values": Noise(values)}
        recipe |= _when_taken(scene, _past(scene, values))
        future = _when_taken(scene, _future(scene, (ROWS, ahead, *values[2:])))
        if future:
            yield recipe | future
        yield recipe


def _past(scene: Scene, shape: tuple[int, ...]) -> Recipe:
    times = first(scene.config, "num_time_features") or 0
    return {
        "past_time_features": Noise((*shape[:2], times)),
        "past_observed_mask": Fixed(torch.ones(shape)),
        "past_values_padding": Fixed(torch.zeros(shape)),
        "freq": Integers((ROWS, 1), 3),
    }


def _future(scene: Scene, shape: tuple[int, ...]) -> dict[str, Part]:
    times = first(scene.config, "num_time_features") or 0
    return {
        "future_values": Noise(shape),
        "future_time_features": Noise((*shape[:2], times)),
        "target_values": Noise(shape),
    }


def _when_taken(scene: Scene, recipe: Recipe) -> Recipe:
    return {name: part for name, part in recipe.items() if scene.takes(name)}
