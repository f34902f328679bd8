"""Sound: spectrograms and waveforms, in the layouts that models take.

Time series: the past, its observed points, and the future that is to be predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide_zoo.model_inputs import ROWS, Fixed, Integers, ModelInputs, Noise, Part, Recipe, anywhere, first

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


def spectrograms(inputs: ModelInputs, name: str, takes: Collection[str]) -> Iterator[Recipe]:
    """Layouts of spectrograms as the argument `name`: bins or frames first, with a mask where one is taken."""
    tower = inputs.tower(*_TOWERS)
    bins = (first(tower, *_BINS) or anywhere(inputs.config, *_BINS) or USUAL_BINS) * (
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


def waveforms(inputs: ModelInputs, name: str, takes: Collection[str]) -> Iterator[Recipe]:
    """Layouts of waveforms as the argument `name`, and of spectrograms that go by the same name."""
    for samples in (SAMPLES, 4 * SAMPLES):
        for shape in ((ROWS, samples), (ROWS, 1, samples)):
            for mask in _masks(takes, samples):
                yield {name: Noise(shape), **mask}
    config: Any = inputs.tower(*_TOWERS)
    frames, bins = first(config, "max_length") or LONG, first(config, *_BINS) or USUAL_BINS
    yield {name: Noise((ROWS, frames, bins))}


def series(inputs: ModelInputs) -> Iterator[Recipe]:
    """Layouts of time series, for models that take past values."""
    config = inputs.config
    context = first(config, "context_length") or 32
    lags = max(first(config, "lags_sequence") or [0])
    channels = first(config, "num_input_channels", "input_size") or 1
    ahead = first(config, "prediction_length") or 4
    past = context + lags
    for values in ((ROWS, past), (ROWS, past, channels)):
        recipe: Recipe = {"past_values": Noise(values)}
        recipe |= _when_taken(inputs, _past(inputs, values))
        future = _when_taken(inputs, _future(inputs, (ROWS, ahead, *values[2:])))
        if future:
            yield recipe | future
        yield recipe


def _past(inputs: ModelInputs, shape: tuple[int, ...]) -> Recipe:
    times = first(inputs.config, "num_time_features") or 0
    return {
        "past_time_features": Noise((*shape[:2], times)),
        "past_observed_mask": Fixed(torch.ones(shape)),
        "past_values_padding": Fixed(torch.zeros(shape)),
        "freq": Integers((ROWS, 1), 3),
    }


def _future(inputs: ModelInputs, shape: tuple[int, ...]) -> dict[str, Part]:
    times = first(inputs.config, "num_time_features") or 0
    return {
        "future_values": Noise(shape),
        "future_time_features": Noise((*shape[:2], times)),
        "target_values": Noise(shape),
    }


def _when_taken(inputs: ModelInputs, recipe: Recipe) -> Recipe:
    return {name: part for name, part in recipe.items() if inputs.takes(name)}
