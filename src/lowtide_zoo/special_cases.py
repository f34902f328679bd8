"""Describes the batches of single architectures that cannot be inferred from the arguments of a forward.

Text and audio are here, images in `special_images`. Each function's docstring says what is special about its batch. A
recipe may name arguments that some of the type's classes do not take; those are left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide_zoo import special_images
from lowtide_zoo.classes import first_field, nested_field
from lowtide_zoo.model_inputs import (
    LENGTH,
    ROWS,
    CopyOf,
    Fixed,
    Integers,
    ModelInputs,
    Noise,
    Recipe,
    ones,
    text_recipe,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def special_case(inputs: ModelInputs) -> Recipe | None:
    """Return the recipe made for this model's type, if there is one."""
    make = _BATCHES.get(inputs.config.model_type)
    return make(inputs) if make is not None else None


def _decision_transformer(inputs: ModelInputs) -> Recipe:
    """Give trajectories of states, actions and returns."""
    state, action = first_field(inputs.config, "state_dim"), first_field(inputs.config, "act_dim")
    return {
        "states": Noise((ROWS, LENGTH, state)),
        "actions": Noise((ROWS, LENGTH, action)),
        "rewards": Noise((ROWS, LENGTH, 1)),
        "returns_to_go": Noise((ROWS, LENGTH, 1)),
        "timesteps": Integers((ROWS, LENGTH), 64),
        "attention_mask": ones(ROWS, LENGTH),
    }


def _blt_local(inputs: ModelInputs) -> Recipe:
    """Give bytes, and the patches of three bytes that they belong to."""
    width = first_field(inputs.config, "hidden_size_global", "hidden_size")
    return {
        "input_ids": inputs.tokens(),
        "inputs_embeds": Noise((ROWS, LENGTH, first_field(inputs.config, "hidden_size"))),
        "patch_embeds": Noise((ROWS, LENGTH // 3, width)),
        "num_patches": Fixed(LENGTH // 3),
        "patch_ids": Fixed((torch.arange(LENGTH) // 3).repeat(ROWS, 1)),
    }


def _evolla(inputs: ModelInputs) -> Recipe:
    """Give a protein beside the text."""
    return text_recipe(inputs) | {
        "protein_input_ids": Integers((ROWS, LENGTH), 20, low=4),
        "protein_attention_mask": ones(ROWS, LENGTH),
        "labels": CopyOf("input_ids"),
    }


def _with_encoder(inputs: ModelInputs) -> Recipe:
    """Give an encoder's output: this decoder never runs without one."""
    width = first_field(inputs.config, "cross_attention_hidden_size", "hidden_size")
    return text_recipe(inputs) | {"encoder_hidden_states": Noise((ROWS, LENGTH, width))}


_TEXT: dict[str, Callable[[ModelInputs], Recipe]] = {
    "blt_local_decoder": _blt_local,
    "blt_local_encoder": _blt_local,
    "decision_transformer": _decision_transformer,
    "evolla": _evolla,
    "t5gemma2_decoder": _with_encoder,
}


def _dia(inputs: ModelInputs) -> Recipe:
    """Give several codes at every step of the decoder; labels have a row per channel, with all of its codes."""
    count = nested_field(inputs.config, "num_channels")
    codes = Integers((ROWS, LENGTH, count), 64, low=1)
    return text_recipe(inputs) | {"decoder_input_ids": codes, "labels": Integers((ROWS * count, LENGTH), 64, low=1)}


def _dia_decoder(inputs: ModelInputs) -> Recipe:
    """Give several codes at every step, and an encoder's output of its width."""
    codes = Integers((ROWS, LENGTH, first_field(inputs.config, "num_channels")), 64, low=1)
    return {
        "input_ids": codes,
        "encoder_hidden_states": Noise((ROWS, LENGTH, first_field(inputs.config, "cross_hidden_size"))),
    }


def _csm(inputs: ModelInputs) -> Recipe:
    """Give a frame of codes at every step, and as labels, too: the depth decoder runs on labels only."""
    codes = Integers((ROWS, LENGTH, first_field(inputs.config, "num_codebooks")), 64, low=1)
    return {"input_ids": codes, "attention_mask": ones(ROWS, LENGTH), "labels": CopyOf("input_ids")}


def _frames_of_codes(inputs: ModelInputs) -> Recipe:
    """Give a text token and a code of every codebook at every step."""
    books = first_field(inputs.config, "num_codebooks")
    return {"input_ids": Integers((ROWS, LENGTH, books + 1), 64, low=1), "attention_mask": ones(ROWS, LENGTH)}


def _fastspeech2(inputs: ModelInputs) -> Recipe:
    """Give all labels: training takes them at once. Every token lasts two frames."""
    config = inputs.tower("model_config")
    return text_recipe(inputs) | {
        "spectrogram_labels": Noise((ROWS, 2 * LENGTH, first_field(config, "num_mel_bins"))),
        "duration_labels": Fixed(torch.full((ROWS, LENGTH), 2)),
        "pitch_labels": Noise((ROWS, LENGTH, 1)),
        "energy_labels": Noise((ROWS, LENGTH, 1)),
    }


def _gemma3n_audio(inputs: ModelInputs) -> Recipe:
    """Give a mask of zeros: it marks what is left out."""
    frames = 64
    mask = Fixed(torch.zeros(ROWS, frames, dtype=torch.bool))
    return {"audio_mel": Noise((ROWS, frames, first_field(inputs.config, "input_feat_size"))), "audio_mel_mask": mask}


def _inkling_audio(inputs: ModelInputs) -> Recipe:
    """Give a code for every mel bin."""
    return {"audio_input_ids": Integers((ROWS, LENGTH, first_field(inputs.config, "n_mel_bins")), 64)}


def _codes_of_books(inputs: ModelInputs) -> Recipe:
    """Give each codebook its own rows of codes."""
    books = nested_field(inputs.config, "num_codebooks")
    codes = Integers((ROWS * books, LENGTH), 64, low=1)
    labels = Integers((ROWS, LENGTH, books), 64, low=1)
    if inputs.takes("decoder_input_ids"):
        return text_recipe(inputs) | {"decoder_input_ids": codes, "labels": labels}
    return {"input_ids": codes, "labels": labels}


def _moshi_depth(inputs: ModelInputs) -> Recipe:
    """Give one token per codebook: the sequence is never longer."""
    books = first_field(inputs.config, "num_codebooks")
    return {
        "input_ids": Integers((ROWS, books), 64, low=1),
        "last_hidden_state": Noise((ROWS, 1, first_field(inputs.config, "input_size"))),
        "labels": Integers((ROWS, books), 64, low=1),
    }


def _concatenated_frames(inputs: ModelInputs) -> Recipe:
    """Concatenate the spectrograms of all rows, and give their lengths."""
    frames = 16
    bins = first_field(inputs.config, "num_mel_bins")
    lengths = Fixed(torch.tensor([frames] * ROWS))
    return {"input_features": Noise((bins, ROWS * frames)), "feature_lens": lengths, "aftercnn_lens": lengths}


def _masked_frames(inputs: ModelInputs) -> Recipe:
    """Give a spectrogram as hidden states, with a mask."""
    bins = first_field(inputs.config, "input_size") or 16
    return {"hidden_states": Noise((ROWS, 64, bins)), "mask": Fixed(torch.ones(ROWS, 64, dtype=torch.bool))}


def _speech_encoder(inputs: ModelInputs) -> Recipe:
    """Give waveforms to the encoder: the model's arguments leave open what it takes."""
    waveform = Noise((ROWS, 3840))
    return {"input_values": waveform, "decoder_input_ids": inputs.tokens(), "labels": CopyOf("decoder_input_ids")}


def _stacked_frames(inputs: ModelInputs) -> Recipe:
    """Give several frames at every step, as wide as the model's first layer."""
    width = next(m.in_features for m in inputs.model.modules() if isinstance(m, nn.Linear))
    name = "input_features" if inputs.takes("input_features") else "hidden_states"
    return {name: Noise((ROWS, 32, width)), "attention_mask": ones(ROWS, 32)}


def _latents(inputs: ModelInputs) -> Recipe:
    """Give the latents that a decoder makes audio of."""
    return {"latents": Noise((ROWS, first_field(inputs.config, "hidden_size"), LENGTH))}


def _voxtral_realtime(inputs: ModelInputs) -> Recipe:
    """Give a token for every few frames, so that the text is as long as the audio."""
    tower = inputs.config.audio_config
    frames = LENGTH * first_field(inputs.config, "audio_length_per_tok")
    return text_recipe(inputs) | {
        "input_features": Noise((ROWS, first_field(tower, "num_mel_bins"), frames)),
        "labels": CopyOf("input_ids"),
    }


def _waveform_and_features(inputs: ModelInputs) -> Recipe:
    """Give a waveform, and features of it with as many frames as the codec makes of it."""
    frames, hop = LENGTH, math.prod(first_field(inputs.config, "downsampling_ratios"))
    width = nested_field(inputs.config, "feature_projection_input_dim")
    return {"input_values": Noise((ROWS, 1, frames * hop)), "input_features": Noise((ROWS, frames, width))}


def _embeddings(inputs: ModelInputs) -> Recipe:
    """Give embeddings, the only input that this part ever gets."""
    return {"inputs_embeds": Noise((ROWS, LENGTH, first_field(inputs.config, "hidden_size")))}


def _convolution_inputs(inputs: ModelInputs) -> Recipe:
    """Give as many channels as the first convolution takes."""
    channels = next(m.in_channels for m in inputs.model.modules() if isinstance(m, nn.Conv1d))
    return {"hidden_states": Noise((ROWS, channels, 3200 if channels == 1 else LENGTH))}


_AUDIO: dict[str, Callable[[ModelInputs], Recipe]] = {
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
    "neucodec": _waveform_and_features,
    "xcodec2": _waveform_and_features,
    "voxtral_realtime": _voxtral_realtime,
    "pocket_tts_audio_tokenizer_decoder": _latents,
    "inkling_audio": _inkling_audio,
    "kyutai_speech_to_text": _frames_of_codes,
    "moshi_depth": _moshi_depth,
    "musicgen": _codes_of_books,
    "musicgen_decoder": _codes_of_books,
    "musicgen_melody": _codes_of_books,
    "musicgen_melody_decoder": _codes_of_books,
    "phi4_multimodal_audio": _masked_frames,
    "qwen2_5_omni_audio_encoder": _concatenated_frames,
    "qwen3_omni_moe_audio_encoder": _concatenated_frames,
    "qwen3_omni_moe_talker_code_predictor": _embeddings,
    "qwen3_omni_moe_talker_text": _embeddings,
    "vibevoice_acoustic_tokenizer_decoder": _convolution_inputs,
    "vibevoice_acoustic_tokenizer_encoder": _convolution_inputs,
    "speech-encoder-decoder": _speech_encoder,
}

_BATCHES = special_images.BATCHES | _AUDIO | _TEXT
