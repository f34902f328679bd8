"""Proposes batches for a model, from the arguments of its forward; the richest come first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.zoo.audio import spectrograms, waveforms
from lowtide.zoo.companions import with_companions
from lowtide.zoo.labels import with_labels
from lowtide.zoo.placeholders import texts_with_placeholders
from lowtide.zoo.scene import Scene, first, text
from lowtide.zoo.series import series
from lowtide.zoo.unusual_batches import unusual
from lowtide.zoo.vision import pictures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.zoo.parts import Recipe

_MODALITIES = (
    ("pixel_values", pictures),
    ("pixel_values_videos", pictures),
    ("image", pictures),
    ("input_features", spectrograms),
    ("audio_mel", spectrograms),
    ("spectrogram", spectrograms),
    ("mel_spectrogram", spectrograms),
    ("input_values", waveforms),
    ("hidden_states", pictures),
)


def candidates(scene: Scene) -> Iterator[Recipe]:
    """Recipes to try, the richest first, each first with labels and then without."""
    for inputs in _inputs(scene):
        taken = {name: part for name, part in inputs.items() if scene.takes(name)}
        for recipe in with_companions(scene, taken):
            yield from with_labels(scene, recipe)


def _inputs(scene: Scene) -> Iterator[Recipe]:
    yield from unusual(scene)
    yield from texts_with_placeholders(scene)
    if scene.takes("past_values"):
        yield from series(scene)
    for name, layouts in _MODALITIES:
        if scene.takes(name) and (name != "hidden_states" or _looks_at_pictures(scene)):
            for recipe in layouts(scene, name, scene.arguments):
                yield from _with_text(scene, recipe)
    yield from _texts(scene)
    yield {}


def _looks_at_pictures(scene: Scene) -> bool:
    """Whether hidden states are what a vision tower calls its pictures."""
    return "hidden_states" in scene.required and first(scene.config, "patch_size") is not None


def _with_text(scene: Scene, recipe: Recipe) -> Iterator[Recipe]:
    """Beside a picture or sound: text for the encoder, for the decoder, for both, or none."""
    decoder: Recipe = {"decoder_input_ids": scene.tokens()} if scene.takes("decoder_input_ids") else {}
    if "input_ids" not in scene.required and decoder:
        yield recipe | decoder
    if scene.takes("input_ids"):
        yield recipe | decoder | text(scene)
        if decoder:
            yield recipe | text(scene)
    if "input_ids" not in scene.required:
        yield recipe


def _texts(scene: Scene) -> Iterator[Recipe]:
    if not scene.takes("input_ids"):
        return
    if scene.takes("decoder_input_ids"):
        yield text(scene) | {"decoder_input_ids": scene.tokens()}
    yield text(scene)
    yield {"input_ids": scene.tokens()}
