"""Proposes layouts of signals over time: spectrograms, waveforms, and time series with a future to be predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide_zoo.classes import first_field, nested_field
from lowtide_zoo.model_inputs import ROWS, Fixed, Integers, ModelInputs, Noise, Recipe

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

_FRAMES = 32
_MANY_FRAMES = 128

# The bins of models that have the number built in, and not in their configuration.
_USUAL_BINS = 128

# A multiple of the models' strides: some insist on it.
_SAMPLES = 3840


def spectrogram_layouts(inputs: ModelInputs, name: str, arguments: Collection[str]) -> Iterator[Recipe]:
    """Yield layouts of spectrograms as the argument `name`: bins or frames first, with a mask if one is taken."""
    tower = inputs.tower(*_TOWERS)
    bins = first_field(tower, *_BINS) or nested_field(inputs.config, *_BINS) or _USUAL_BINS
    bins *= first_field(tower, "num_stacked_frames") or 1
    # As many frames as two windows hold, or as the encoder has positions for after halving them.
    windows = 4 * (first_field(tower, "n_window") or 0)
    few = windows or 2 * (first_field(tower, "max_source_positions") or _FRAMES // 2)
    for frames in dict.fromkeys((few, _MANY_FRAMES)):
        layouts = ((ROWS, bins, frames), (ROWS, frames, bins))
        # Some models treat a spectrogram as an image.
        for shape in layouts if first_field(tower, "spec_size") is None else ((ROWS, 1, frames, bins),):
            for mask in _masks(arguments, frames):
                yield {name: Noise(shape), **mask}


def waveform_layouts(inputs: ModelInputs, name: str, arguments: Collection[str]) -> Iterator[Recipe]:
    """Yield layouts of waveforms as the argument `name`, then a spectrogram, which some models take under that name."""
    for samples in (_SAMPLES, 4 * _SAMPLES):
        for shape in ((ROWS, samples), (ROWS, 1, samples)):
            for mask in _masks(arguments, samples):
                yield {name: Noise(shape), **mask}
    tower = inputs.tower(*_TOWERS)
    frames, bins = first_field(tower, "max_length") or _MANY_FRAMES, first_field(tower, *_BINS) or _USUAL_BINS
    yield {name: Noise((ROWS, frames, bins))}


def _masks(arguments: Collection[str], frames: int) -> list[Recipe]:
    name = next((name for name in _MASKS if name in arguments), None)
    if name is None:
        return [{}]
    # Some models index features with the mask, which takes booleans; some sum it up, which takes numbers.
    masks: list[Recipe] = [{name: Fixed(torch.ones(ROWS, frames, dtype=kind))} for kind in (torch.bool, torch.long)]
    return [*masks, {}]


def series_layouts(inputs: ModelInputs) -> Iterator[Recipe]:
    """Yield layouts of time series, with the future and without, for models that take past values."""
    config = inputs.config
    context = first_field(config, "context_length") or 32
    lags = max(first_field(config, "lags_sequence") or [0])
    channels = first_field(config, "num_input_channels", "input_size") or 1
    ahead = first_field(config, "prediction_length") or 4
    past = context + lags
    for values in ((ROWS, past), (ROWS, past, channels)):
        recipe: Recipe = {"past_values": Noise(values)}
        recipe |= _taken(inputs, _past(inputs, values))
        future = _taken(inputs, _future(inputs, (ROWS, ahead, *values[2:])))
        if future:
            yield recipe | future
        yield recipe


def _past(inputs: ModelInputs, shape: tuple[int, ...]) -> Recipe:
    times = first_field(inputs.config, "num_time_features") or 0
    return {
        "past_time_features": Noise((*shape[:2], times)),
        "past_observed_mask": Fixed(torch.ones(shape)),
        "past_values_padding": Fixed(torch.zeros(shape)),
        "freq": Integers((ROWS, 1), 3),
    }


def _future(inputs: ModelInputs, shape: tuple[int, ...]) -> Recipe:
    times = first_field(inputs.config, "num_time_features") or 0
    return {
        "future_values": Noise(shape),
        "future_time_features": Noise((*shape[:2], times)),
        "target_values": Noise(shape),
    }


def _taken(inputs: ModelInputs, recipe: Recipe) -> Recipe:
    return {name: part for name, part in recipe.items() if inputs.takes(name)}
