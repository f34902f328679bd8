"""Sound: spectrograms and waveforms, in the layouts that models take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.zoo.parts import Fixed, Noise, Recipe
from lowtide.zoo.scene import ROWS, Scene, anywhere, first

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_TOWERS = (
    "audio_config",
    "speech_config",
    "encoder_config",
    "audio_encoder_config",
    "acoustic_tokenizer_encoder_config",
    "encoder",
)
_BINS = (
    "num_mel_bins",
    "n_mels",
    "input_feat_size",
    "input_dim",
    "feature_projection_input_dim",
    "input_feat_per_channel",
    "n_mel_bins",
    "input_size",
    "feature_size",
    "mel_dim",
    "model_in_dim",
    "audio_embed_dim",
)
_MASKS = (
    "input_features_mask",
    "feature_attention_mask",
    "attention_mask",
    "mask",
    "input_values_mask",
    "padding_mask",
)
FRAMES = 32
LONG = 128
# What models have built in that do not say it in their configuration.
USUAL_BINS = 128
# A multiple of what models stride over, of which some insist on it.
SAMPLES = 3840


def spectrograms(scene: Scene, name: str, takes: Collection[str]) -> Iterator[Recipe]:
    """Layouts of spectrograms as the argument `name`: bins or frames first, with a mask where one is taken."""
    tower = scene.tower(*_TOWERS)
    bins = (first(tower, *_BINS) or anywhere(scene.config, *_BINS) or USUAL_BINS) * (
        first(tower, "num_stacked_frames") or 1
    )
    # As many as two windows hold, or as the encoder has places for after halving them.
    short = 4 * (first(tower, "n_window") or 0) or 2 * (first(tower, "max_source_positions") or FRAMES // 2)
    lengths = dict.fromkeys((short, LONG))
    for frames in lengths:
        layouts = ((ROWS, bins, frames), (ROWS, frames, bins))
        # Some look at a spectrogram as at a picture.
        for shape in layouts if first(tower, "spec_size") is None else ((ROWS, 1, frames, bins),):
            for mask in _masks(takes, frames):
                yield {name: Noise(shape), **mask}


def _masks(takes: Collection[str], frames: int) -> list[Recipe]:
    name = next((name for name in _MASKS if name in takes), None)
    if name is None:
        return [{}]
    # Some pick features by it, which takes booleans; some count with it, which takes numbers.
    masks: list[Recipe] = [{name: Fixed(torch.ones(ROWS, frames, dtype=kind))} for kind in (torch.bool, torch.long)]
    return [*masks, {}]


def waveforms(scene: Scene, name: str, takes: Collection[str]) -> Iterator[Recipe]:
    """Layouts of waveforms as the argument `name`, and of spectrograms that go by the same name."""
    for samples in (SAMPLES, 4 * SAMPLES):
        for shape in ((ROWS, samples), (ROWS, 1, samples)):
            for mask in _masks(takes, samples):
                yield {name: Noise(shape), **mask}
    config: Any = scene.tower(*_TOWERS)
    frames, bins = first(config, "max_length") or LONG, first(config, *_BINS) or USUAL_BINS
    yield {name: Noise((ROWS, frames, bins))}
