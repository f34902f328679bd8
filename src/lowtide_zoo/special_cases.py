"""Unusual batches of text, and of other sequences.

Unusual batches of sound: codes, spectrograms and what they are made from.

Batches of single architectures that cannot be told from the arguments of a forward, each with its reason.

Keyed by model type. A recipe may name arguments that some of the type's classes do not take; those are left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide_zoo import special_images
from lowtide_zoo.model_inputs import (
    LENGTH,
    ROWS,
    Fixed,
    Integers,
    ModelInputs,
    Noise,
    Recipe,
    Same,
    anywhere,
    first,
    ones,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide_zoo.model_inputs import ModelInputs, Recipe


def _decision_transformer(inputs: ModelInputs) -> Recipe:
    """Trajectories of states, actions and returns."""
    state, action = first(inputs.config, "state_dim"), first(inputs.config, "act_dim")
    return {
        "states": Noise((ROWS, LENGTH, state)),
        "actions": Noise((ROWS, LENGTH, action)),
        "rewards": Noise((ROWS, LENGTH, 1)),
        "returns_to_go": Noise((ROWS, LENGTH, 1)),
        "timesteps": Integers((ROWS, LENGTH), 64),
        "attention_mask": ones(ROWS, LENGTH),
    }


def _blt_local(inputs: ModelInputs) -> Recipe:
    """Bytes and the patches that they belong to, three bytes each."""
    width = first(inputs.config, "hidden_size_global", "hidden_size")
    return {
        "input_ids": inputs.tokens(),
        "inputs_embeds": Noise((ROWS, LENGTH, first(inputs.config, "hidden_size"))),
        "patch_embeds": Noise((ROWS, LENGTH // 3, width)),
        "num_patches": Fixed(LENGTH // 3),
        "patch_ids": Fixed((torch.arange(LENGTH) // 3).repeat(ROWS, 1)),
    }


def _evolla(inputs: ModelInputs) -> Recipe:
    """The protein beside the text."""
    return text(inputs) | {
        "protein_input_ids": Integers((ROWS, LENGTH), 20, low=4),
        "protein_attention_mask": ones(ROWS, LENGTH),
        "labels": Same("input_ids"),
    }


def _with_encoder(inputs: ModelInputs) -> Recipe:
    """A decoder that never goes without an encoder."""
    width = first(inputs.config, "cross_attention_hidden_size", "hidden_size")
    return text(inputs) | {"encoder_hidden_states": Noise((ROWS, LENGTH, width))}


_TEXTS: dict[str, Callable[[ModelInputs], Recipe]] = {
    "blt_local_decoder": _blt_local,
    "blt_local_encoder": _blt_local,
    "decision_transformer": _decision_transformer,
    "evolla": _evolla,
    "t5gemma2_decoder": _with_encoder,
}


def _dia(inputs: ModelInputs) -> Recipe:
    """Several codes at every step of the decoder; labels hold all codes of a channel after one another."""
    count = anywhere(inputs.config, "num_channels")
    codes = Integers((ROWS, LENGTH, count), 64, low=1)
    return text(inputs) | {"decoder_input_ids": codes, "labels": Integers((ROWS * count, LENGTH), 64, low=1)}


def _dia_decoder(inputs: ModelInputs) -> Recipe:
    codes = Integers((ROWS, LENGTH, first(inputs.config, "num_channels")), 64, low=1)
    return {
        "input_ids": codes,
        "encoder_hidden_states": Noise((ROWS, LENGTH, first(inputs.config, "cross_hidden_size"))),
    }


def _csm(inputs: ModelInputs) -> Recipe:
    """A frame of codes at every step, which are the labels as well; the depth decoder runs on labels only."""
    codes = Integers((ROWS, LENGTH, first(inputs.config, "num_codebooks")), 64, low=1)
    return {"input_ids": codes, "attention_mask": ones(ROWS, LENGTH), "labels": Same("input_ids")}


def _frames_of_codes(inputs: ModelInputs) -> Recipe:
    """A text token and a code of every codebook at every step."""
    books = first(inputs.config, "num_codebooks")
    return {"input_ids": Integers((ROWS, LENGTH, books + 1), 64, low=1), "attention_mask": ones(ROWS, LENGTH)}


def _fastspeech2(inputs: ModelInputs) -> Recipe:
    """Training takes all labels at once; every token lasts two frames."""
    config = inputs.tower("model_config")
    return text(inputs) | {
        "spectrogram_labels": Noise((ROWS, 2 * LENGTH, first(config, "num_mel_bins"))),
        "duration_labels": Fixed(torch.full((ROWS, LENGTH), 2)),
        "pitch_labels": Noise((ROWS, LENGTH, 1)),
        "energy_labels": Noise((ROWS, LENGTH, 1)),
    }


def _gemma3n_audio(inputs: ModelInputs) -> Recipe:
    """The mask marks what is left out."""
    frames = 64
    mask = Fixed(torch.zeros(ROWS, frames, dtype=torch.bool))
    return {"audio_mel": Noise((ROWS, frames, first(inputs.config, "input_feat_size"))), "audio_mel_mask": mask}


def _inkling_audio(inputs: ModelInputs) -> Recipe:
    return {"audio_input_ids": Integers((ROWS, LENGTH, first(inputs.config, "n_mel_bins")), 64)}


def _codes_of_books(inputs: ModelInputs) -> Recipe:
    """The codes of a step's codebooks stand in rows of their own."""
    books = anywhere(inputs.config, "num_codebooks")
    codes = Integers((ROWS * books, LENGTH), 64, low=1)
    labels = Integers((ROWS, LENGTH, books), 64, low=1)
    if inputs.takes("decoder_input_ids"):
        return text(inputs) | {"decoder_input_ids": codes, "labels": labels}
    return {"input_ids": codes, "labels": labels}


def _moshi_depth(inputs: ModelInputs) -> Recipe:
    """A token for each codebook, no more."""
    books = first(inputs.config, "num_codebooks")
    return {
        "input_ids": Integers((ROWS, books), 64, low=1),
        "last_hidden_state": Noise((ROWS, 1, first(inputs.config, "input_size"))),
        "labels": Integers((ROWS, books), 64, low=1),
    }


def _frames_of_sound(inputs: ModelInputs) -> Recipe:
    """Spectrograms of all rows after one another, and their lengths."""
    frames = 16
    bins = first(inputs.config, "num_mel_bins")
    lengths = Fixed(torch.tensor([frames] * ROWS))
    return {"input_features": Noise((bins, ROWS * frames)), "feature_lens": lengths, "aftercnn_lens": lengths}


def _masked_sound(inputs: ModelInputs) -> Recipe:
    bins = first(inputs.config, "input_size") or 16
    return {"hidden_states": Noise((ROWS, 64, bins)), "mask": Fixed(torch.ones(ROWS, 64, dtype=torch.bool))}


def _speech(inputs: ModelInputs) -> Recipe:
    """The encoder hears waveforms, which the model's own arguments leave open."""
    sound = Noise((ROWS, 3840))
    return {"input_values": sound, "decoder_input_ids": inputs.tokens(), "labels": Same("decoder_input_ids")}


def _stacked_frames(inputs: ModelInputs) -> Recipe:
    """Every step holds several frames, as wide as the model's first layer."""
    width = next(m.in_features for m in inputs.model.modules() if isinstance(m, nn.Linear))
    name = "input_features" if inputs.takes("input_features") else "hidden_states"
    return {name: Noise((ROWS, 32, width)), "attention_mask": ones(ROWS, 32)}


def _latents(inputs: ModelInputs) -> Recipe:
    return {"latents": Noise((ROWS, first(inputs.config, "hidden_size"), LENGTH))}


def _voxtral_realtime(inputs: ModelInputs) -> Recipe:
    """A token for every few frames, and so as long as the sound."""
    tower = inputs.config.audio_config
    frames = LENGTH * first(inputs.config, "audio_length_per_tok")
    return text(inputs) | {
        "input_features": Noise((ROWS, first(tower, "num_mel_bins"), frames)),
        "labels": Same("input_ids"),
    }


def _sound_twice(inputs: ModelInputs) -> Recipe:
    """A waveform, and features of it with as many frames as the codec makes of it."""
    frames, hop = LENGTH, math.prod(first(inputs.config, "downsampling_ratios"))
    width = anywhere(inputs.config, "feature_projection_input_dim")
    return {"input_values": Noise((ROWS, 1, frames * hop)), "input_features": Noise((ROWS, frames, width))}


def _embedded(inputs: ModelInputs) -> Recipe:
    """A part that is only ever given embeddings."""
    return {"inputs_embeds": Noise((ROWS, LENGTH, first(inputs.config, "hidden_size")))}


def _convolved(inputs: ModelInputs) -> Recipe:
    """As many channels as the first convolution takes."""
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

BATCHES = special_images.BATCHES | _AUDIO | _TEXTS


def special_case(inputs: ModelInputs) -> list[Recipe]:
    """The batch made for this model's type, if there is one."""
    make = BATCHES.get(inputs.config.model_type)
    return [make(inputs)] if make is not None else []
