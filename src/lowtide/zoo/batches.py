"""Proposes batches for a model, from the arguments of its forward; the richest come first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide.zoo.audio import spectrograms, waveforms
from lowtide.zoo.companions import with_companions
from lowtide.zoo.labels import with_labels
from lowtide.zoo.parts import Fixed, Recipe
from lowtide.zoo.placeholders import texts_with_placeholders
from lowtide.zoo.scene import LENGTH, ROWS, Scene
from lowtide.zoo.series import series
from lowtide.zoo.vision import pictures

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODALITIES = (
    ("pixel_values", pictures),
    ("pixel_values_videos", pictures),
    ("input_features", spectrograms),
    ("audio_mel", spectrograms),
    ("spectrogram", spectrograms),
    ("input_values", waveforms),
    ("hidden_states", pictures),
)


def candidates(scene: Scene) -> Iterator[Recipe]:
    """Recipes to try, the richest first, each first with labels and then without."""
    for inputs in _inputs(scene):
        taken = {name: part for name, part in inputs.items() if scene.takes(name)}
        yield from with_labels(scene, with_companions(scene, taken))


def _inputs(scene: Scene) -> Iterator[Recipe]:
    yield from texts_with_placeholders(scene)
    if scene.takes("past_values"):
        yield from series(scene)
    for name, layouts in _MODALITIES:
        if scene.takes(name) and (name != "hidden_states" or "grid_thw" in scene.required):
            for recipe in layouts(scene, name, scene.arguments):
                yield from _with_text(scene, recipe)
    yield from _texts(scene)
    yield {}


def _with_text(scene: Scene, recipe: Recipe) -> Iterator[Recipe]:
    """Beside a picture or sound: text for the encoder, or for the decoder, or none."""
    if scene.takes("decoder_input_ids"):
        yield recipe | {"decoder_input_ids": scene.tokens()}
    if scene.takes("input_ids"):
        yield _text(scene) | recipe
    yield recipe


def _texts(scene: Scene) -> Iterator[Recipe]:
    if not scene.takes("input_ids"):
        return
    if scene.takes("decoder_input_ids"):
        yield _text(scene) | {"decoder_input_ids": scene.tokens()}
    yield _text(scene)
    yield {"input_ids": scene.tokens()}


def _text(scene: Scene) -> Recipe:
    mask = Fixed(torch.ones(ROWS, LENGTH, dtype=torch.long))
    return {"input_ids": scene.tokens()} | ({"attention_mask": mask} if scene.takes("attention_mask") else {})
