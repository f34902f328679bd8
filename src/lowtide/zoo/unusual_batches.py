"""Batches of single architectures that cannot be told from the arguments alone, each with its reason.

Keyed by model type. A recipe may name arguments that some of the type's classes do not take; those are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide.zoo.parts import Fixed, Fractions, Integers, Noise, Part, Recipe, Same
from lowtide.zoo.scene import LENGTH, ROWS, Scene, anywhere, first
from lowtide.zoo.vision import GRID, channels, patch_size, picture_sizes, vision_tower

if TYPE_CHECKING:
    from collections.abc import Callable


def unusual(scene: Scene) -> list[Recipe]:
    """The batch made for this model's type, if there is one."""
    make = BATCHES.get(scene.config.model_type)
    return [make(scene)] if make is not None else []


def ones(*shape: int) -> Fixed:
    """A mask that lets everything through."""
    return Fixed(torch.ones(shape, dtype=torch.long))


def text(scene: Scene, length: int = LENGTH) -> Recipe:
    """Plain text and its mask."""
    return {"input_ids": scene.tokens(length), "attention_mask": ones(ROWS, length)}


def one_picture(scene: Scene) -> tuple[int, int, int]:
    """The shape of a picture."""
    tower = vision_tower(scene)
    return (channels(tower), *picture_sizes(tower)[0])


def _decision_transformer(scene: Scene) -> Recipe:
    """Trajectories of states, actions and returns."""
    state, action = first(scene.config, "state_dim"), first(scene.config, "act_dim")
    return {
        "states": Noise((ROWS, LENGTH, state)),
        "actions": Noise((ROWS, LENGTH, action)),
        "rewards": Noise((ROWS, LENGTH, 1)),
        "returns_to_go": Noise((ROWS, LENGTH, 1)),
        "timesteps": Integers((ROWS, LENGTH), 64),
        "attention_mask": ones(ROWS, LENGTH),
    }


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


def _blt_local(scene: Scene) -> Recipe:
    """Bytes and the patches that they belong to, three bytes each."""
    width = first(scene.config, "hidden_size_global", "hidden_size")
    return {
        "input_ids": scene.tokens(),
        "inputs_embeds": Noise((ROWS, LENGTH, first(scene.config, "hidden_size"))),
        "patch_embeds": Noise((ROWS, LENGTH // 3, width)),
        "num_patches": Fixed(LENGTH // 3),
        "patch_ids": Fixed((torch.arange(LENGTH) // 3).repeat(ROWS, 1)),
    }


def _colqwen2(scene: Scene) -> Recipe:
    """Patches are padded to one length in every row, not put after one another."""
    tower = vision_tower(scene)
    token, side = anywhere(scene.config, "image_token_id"), patch_size(tower)
    width = channels(tower) * first(tower, "temporal_patch_size") * side * side
    placeholders = GRID * GRID // first(tower, "spatial_merge_size") ** 2
    return {
        "input_ids": scene.tokens(LENGTH, [(2 + place, token) for place in range(placeholders)]),
        "attention_mask": ones(ROWS, LENGTH),
        "pixel_values": Noise((ROWS, GRID * GRID, width)),
        "image_grid_thw": Fixed(torch.tensor([[1, GRID, GRID]] * ROWS)),
    }


def _evolla(scene: Scene) -> Recipe:
    """The protein beside the text."""
    return text(scene) | {
        "protein_input_ids": Integers((ROWS, LENGTH), 20, low=4),
        "protein_attention_mask": ones(ROWS, LENGTH),
        "labels": Same("input_ids"),
    }


def _fastspeech2(scene: Scene) -> Recipe:
    """Training takes all labels at once; every token lasts two frames."""
    config = scene.tower("model_config")
    return text(scene) | {
        "spectrogram_labels": Noise((ROWS, 2 * LENGTH, first(config, "num_mel_bins"))),
        "duration_labels": Fixed(torch.full((ROWS, LENGTH), 2)),
        "pitch_labels": Noise((ROWS, LENGTH, 1)),
        "energy_labels": Noise((ROWS, LENGTH, 1)),
    }


def _qformer(scene: Scene) -> Recipe:
    """Queries that attend to a picture's features."""
    width = first(scene.config, "hidden_size")
    return {
        "input_ids": scene.tokens(),
        "query_embeds": Noise((ROWS, 8, width)),
        "encoder_hidden_states": Noise((ROWS, LENGTH, first(scene.config, "encoder_hidden_size"))),
    }


def _instructblip(scene: Scene) -> Recipe:
    """One placeholder for every query; a video is one picture after the other."""
    token, queries = anywhere(scene.config, "image_token_index"), first(scene.config, "num_query_tokens")
    is_video = "video" in scene.config.model_type
    frames = 4 if is_video else 1
    if is_video:
        token = anywhere(scene.config, "video_token_index")
    length = LENGTH + frames * queries
    shape = one_picture(scene)
    return {
        "pixel_values": Noise((ROWS, frames, *shape) if is_video else (ROWS, *shape)),
        "input_ids": scene.tokens(length, [(2 + place, token) for place in range(frames * queries)]),
        "attention_mask": ones(ROWS, length),
        "qformer_input_ids": scene.tokens(),
        "qformer_attention_mask": ones(ROWS, LENGTH),
        "labels": Same("input_ids"),
    }


def _idefics(scene: Scene) -> Recipe:
    """Which token sees which picture."""
    return text(scene) | {
        "pixel_values": Noise((ROWS, 1, *one_picture(scene))),
        "image_attention_mask": ones(ROWS, LENGTH, 1),
        "labels": Same("input_ids"),
    }


def _kosmos2(scene: Scene) -> Recipe:
    """Places for pictures are marked by a mask, not by a token."""
    queries = first(scene.config, "latent_query_num")
    length = LENGTH + queries
    mask = torch.zeros(ROWS, length, dtype=torch.long)
    mask[:, 2 : 2 + queries] = 1
    return text(scene, length) | {
        "pixel_values": Noise((ROWS, *one_picture(scene))),
        "flattened_patches": flattened_patches(scene),
        "image_embeds_position_mask": Fixed(mask),
        "labels": Same("input_ids"),
    }


def flattened_patches(scene: Scene) -> Part:
    """Patches with their row and column, counted from one, in front."""
    tower = vision_tower(scene)
    return _Patches(GRID, channels(tower) * patch_size(tower) ** 2)


class _Patches:
    def __init__(self, side: int, width: int) -> None:
        self._side, self._width = side, width

    def make(self, generator: torch.Generator, made: dict[str, object]) -> torch.Tensor:  # noqa: ARG002
        rows, columns = torch.meshgrid(torch.arange(self._side), torch.arange(self._side), indexing="ij")
        places = torch.stack([rows, columns], dim=-1).view(1, -1, 2).repeat(ROWS, 1, 1) + 1
        pixels = torch.randn(ROWS, self._side**2, self._width, generator=generator)
        return torch.cat([places.float(), pixels], dim=-1)


def _kosmos2_5_vision(scene: Scene) -> Recipe:
    return {"flattened_patches": flattened_patches(scene)}


def _mllama(scene: Scene) -> Recipe:
    """Pictures are cut into tiles, of which all are used, and text attends to all of them."""
    tower = vision_tower(scene)
    tiles = first(tower, "max_num_tiles")
    return text(scene) | {
        "pixel_values": Noise((ROWS, 1, tiles, *one_picture(scene))),
        "aspect_ratio_ids": ones(ROWS, 1),
        "aspect_ratio_mask": ones(ROWS, 1, tiles),
        "cross_attention_mask": ones(ROWS, LENGTH, 1, tiles),
        "labels": Same("input_ids"),
    }


def _resampler(scene: Scene) -> Recipe:
    return {"context": Noise((ROWS, LENGTH, first(scene.config, "hidden_size"))), "attention_mask": ones(ROWS, LENGTH)}


def _gemma3n_audio(scene: Scene) -> Recipe:
    """The mask marks what is left out."""
    frames = 64
    mask = Fixed(torch.zeros(ROWS, frames, dtype=torch.bool))
    return {"audio_mel": Noise((ROWS, frames, first(scene.config, "input_feat_size"))), "audio_mel_mask": mask}


def _inkling_audio(scene: Scene) -> Recipe:
    return {"audio_input_ids": Integers((ROWS, LENGTH, first(scene.config, "n_mel_bins")), 64)}


def _pictures_with_prompts(scene: Scene) -> Recipe:
    """A point on a picture, as one prompt."""
    return {
        "pixel_values": Noise((ROWS, *one_picture(scene))),
        "input_points": Fractions((ROWS, 1, 1, 2), high=float(one_picture(scene)[1])),
        "input_labels": ones(ROWS, 1, 1),
    }


def _pairs_of_pictures(scene: Scene) -> Recipe:
    """Two pictures in which points are matched."""
    return {"pixel_values": Noise((ROWS, 2, 3, *one_picture(scene)[1:]))}


BATCHES: dict[str, Callable[[Scene], Recipe]] = {
    "blip_2_qformer": _qformer,
    "blt_local_decoder": _blt_local,
    "blt_local_encoder": _blt_local,
    "colqwen2": _colqwen2,
    "csm": _csm,
    "decision_transformer": _decision_transformer,
    "dia": _dia,
    "dia_decoder": _dia_decoder,
    "efficientloftr": _pairs_of_pictures,
    "evolla": _evolla,
    "fastspeech2_conformer": _fastspeech2,
    "fastspeech2_conformer_with_hifigan": _fastspeech2,
    "gemma3n_audio": _gemma3n_audio,
    "idefics": _idefics,
    "idefics2_perceiver": _resampler,
    "inkling_audio": _inkling_audio,
    "instructblip": _instructblip,
    "instructblip_qformer": _qformer,
    "instructblipvideo": _instructblip,
    "instructblipvideo_qformer": _qformer,
    "kosmos-2": _kosmos2,
    "kosmos-2.5": _kosmos2,
    "kosmos_2_5_vision_model": _kosmos2_5_vision,
    "kyutai_speech_to_text": _frames_of_codes,
    "lightglue": _pairs_of_pictures,
    "mllama": _mllama,
    "mllama_vision_model": _mllama,
    "sam": _pictures_with_prompts,
    "sam2": _pictures_with_prompts,
    "sam3_tracker": _pictures_with_prompts,
    "sam_hq": _pictures_with_prompts,
    "superglue": _pairs_of_pictures,
}
