"""Unusual batches of sound: codes, spectrograms and what they are made from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide.zoo.parts import Fixed, Integers, Noise, Recipe, Same
from lowtide.zoo.scene import LENGTH, ROWS, Scene, anywhere, first, ones, text

if TYPE_CHECKING:
    from collections.abc import Callable


def _dia(scene: Scene) -> Recipe:
    """Several codes at every step of the decoder; labels hold all codes of a channel after one another."""
    count = anywhere(scene.config, "num_channels")
    codes = Integers((ROWS, LENGTH, count), 64, low=1)
    return text(scene) | {"decoder_input_ids": codes, "labels": Integers((ROWS * count, LENGTH), 64, low=1)}


def _dia_decoder(scene: Scene) -> Recipe:
    codes = Integers((ROWS, LENGTH, first(scene.config, "num_channels")), 64, low=1)
    return {
        "input_ids": codes,
        "encoder_hidden_states": Noise((ROWS, LENGTH, first(scene.config, "cross_hidden_size"))),
    }


def _csm(scene: Scene) -> Recipe:
    """A frame of codes at every step, which are the labels as well; the depth decoder runs on labels only."""
    codes = Integers((ROWS, LENGTH, first(scene.config, "num_codebooks")), 64, low=1)
    return {"input_ids": codes, "attention_mask": ones(ROWS, LENGTH), "labels": Same("input_ids")}


def _frames_of_codes(scene: Scene) -> Recipe:
    """A text token and a code of every codebook at every step."""
    books = first(scene.config, "num_codebooks")
    return {"input_ids": Integers((ROWS, LENGTH, books + 1), 64, low=1), "attention_mask": ones(ROWS, LENGTH)}


def _fastspeech2(scene: Scene) -> Recipe:
    """Training takes all labels at once; every token lasts two frames."""
    config = scene.tower("model_config")
    return text(scene) | {
        "spectrogram_labels": Noise((ROWS, 2 * LENGTH, first(config, "num_mel_bins"))),
        "duration_labels": Fixed(torch.full((ROWS, LENGTH), 2)),
        "pitch_labels": Noise((ROWS, LENGTH, 1)),
        "energy_labels": Noise((ROWS, LENGTH, 1)),
    }


def _gemma3n_audio(scene: Scene) -> Recipe:
    """The mask marks what is left out."""
    frames = 64
    mask = Fixed(torch.zeros(ROWS, frames, dtype=torch.bool))
    return {"audio_mel": Noise((ROWS, frames, first(scene.config, "input_feat_size"))), "audio_mel_mask": mask}


def _inkling_audio(scene: Scene) -> Recipe:
    return {"audio_input_ids": Integers((ROWS, LENGTH, first(scene.config, "n_mel_bins")), 64)}


def _codes_of_books(scene: Scene) -> Recipe:
    """The codes of a step's codebooks stand in rows of their own."""
    books = anywhere(scene.config, "num_codebooks")
    codes = Integers((ROWS * books, LENGTH), 64, low=1)
    labels = Integers((ROWS, LENGTH, books), 64, low=1)
    if scene.takes("decoder_input_ids"):
        return text(scene) | {"decoder_input_ids": codes, "labels": labels}
    return {"input_ids": codes, "labels": labels}


def _moshi_depth(scene: Scene) -> Recipe:
    """A token for each codebook, no more."""
    books = first(scene.config, "num_codebooks")
    return {
        "input_ids": Integers((ROWS, books), 64, low=1),
        "last_hidden_state": Noise((ROWS, 1, first(scene.config, "input_size"))),
        "labels": Integers((ROWS, books), 64, low=1),
    }


def _frames_of_sound(scene: Scene) -> Recipe:
    """Spectrograms of all rows after one another, and their lengths."""
    frames = 16
    bins = first(scene.config, "num_mel_bins")
    lengths = Fixed(torch.tensor([frames] * ROWS))
    return {"input_features": Noise((bins, ROWS * frames)), "feature_lens": lengths, "aftercnn_lens": lengths}


def _masked_sound(scene: Scene) -> Recipe:
    bins = first(scene.config, "input_size") or 16
    return {"hidden_states": Noise((ROWS, 64, bins)), "mask": Fixed(torch.ones(ROWS, 64, dtype=torch.bool))}


def _speech(scene: Scene) -> Recipe:
    """The encoder hears waveforms, which the model's own arguments leave open."""
    sound = Noise((ROWS, 3840))
    return {"input_values": sound, "decoder_input_ids": scene.tokens(), "labels": Same("decoder_input_ids")}


def _stacked_frames(scene: Scene) -> Recipe:
    """Every step holds several frames, as wide as the model's first layer."""
    width = next(m.in_features for m in scene.model.modules() if isinstance(m, nn.Linear))
    name = "input_features" if scene.takes("input_features") else "hidden_states"
    return {name: Noise((ROWS, 32, width)), "attention_mask": ones(ROWS, 32)}


def _latents(scene: Scene) -> Recipe:
    return {"latents": Noise((ROWS, first(scene.config, "hidden_size"), LENGTH))}


def _voxtral_realtime(scene: Scene) -> Recipe:
    """A token for every few frames, and so as long as the sound."""
    tower = scene.config.audio_config
    frames = LENGTH * first(scene.config, "audio_length_per_tok")
    return text(scene) | {
        "input_features": Noise((ROWS, first(tower, "num_mel_bins"), frames)),
        "labels": Same("input_ids"),
    }


def _sound_twice(scene: Scene) -> Recipe:
    """A waveform, and features of it with as many frames as the codec makes of it."""
    frames, hop = LENGTH, math.prod(first(scene.config, "downsampling_ratios"))
    width = anywhere(scene.config, "feature_projection_input_dim")
    return {"input_values": Noise((ROWS, 1, frames * hop)), "input_features": Noise((ROWS, frames, width))}


def _embedded(scene: Scene) -> Recipe:
    """A part that is only ever given embeddings."""
    return {"inputs_embeds": Noise((ROWS, LENGTH, first(scene.config, "hidden_size")))}


def _convolved(scene: Scene) -> Recipe:
    """As many channels as the first convolution takes."""
    channels = next(m.in_channels for m in scene.model.modules() if isinstance(m, nn.Conv1d))
    return {"hidden_states": Noise((ROWS, channels, 3200 if channels == 1 else LENGTH))}


BATCHES: dict[str, Callable[[Scene], Recipe]] = {
    "csm": _csm,
    "dia": _dia,
    "dia_decoder": _dia_decoder,
    "fastspeech2_conformer": _fastspeech2,
    "fastspeech2_conformer_with_hifigan": _fastspeech2,
    "gemma3n_audio": _gemma3n_audio,
    "granite_speech5_ctc": _stacked_frames,
    "granite_speech5_encoder": _stacked_frames,
    "granite_speech_encoder": _stacked_frames,
    "granite_speech_plus_encoder": _stacked_frames,
    "mimi_decoder": _latents,
    "neucodec": _sound_twice,
    "xcodec2": _sound_twice,
    "voxtral_realtime": _voxtral_realtime,
    "pocket_tts_audio_tokenizer_decoder": _latents,
    "inkling_audio": _inkling_audio,
    "kyutai_speech_to_text": _frames_of_codes,
    "moshi_depth": _moshi_depth,
    "musicgen": _codes_of_books,
    "musicgen_decoder": _codes_of_books,
    "musicgen_melody": _codes_of_books,
    "musicgen_melody_decoder": _codes_of_books,
    "phi4_multimodal_audio": _masked_sound,
    "qwen2_5_omni_audio_encoder": _frames_of_sound,
    "qwen3_omni_moe_audio_encoder": _frames_of_sound,
    "qwen3_omni_moe_talker_code_predictor": _embedded,
    "qwen3_omni_moe_talker_text": _embedded,
    "vibevoice_acoustic_tokenizer_decoder": _convolved,
    "vibevoice_acoustic_tokenizer_encoder": _convolved,
    "speech-encoder-decoder": _speech,
}
