"""Unusual batches with pictures: what goes with them cannot be told from the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide_zoo.images import GRID, channels, flattened_patches, one_picture, patch_size, vision_tower
from lowtide_zoo.model_inputs import (
    LENGTH,
    ROWS,
    Fixed,
    Fractions,
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


def _colqwen2(inputs: ModelInputs) -> Recipe:
    """Patches are padded to one length in every row, not put after one another."""
    tower = vision_tower(inputs)
    token, side = anywhere(inputs.config, "image_token_id"), patch_size(tower)
    width = channels(tower) * first(tower, "temporal_patch_size") * side * side
    placeholders = GRID * GRID // first(tower, "spatial_merge_size") ** 2
    return {
        "input_ids": inputs.tokens(LENGTH, [(2 + place, token) for place in range(placeholders)]),
        "attention_mask": ones(ROWS, LENGTH),
        "pixel_values": Noise((ROWS, GRID * GRID, width)),
        "image_grid_thw": Fixed(torch.tensor([[1, GRID, GRID]] * ROWS)),
    }


def _qformer(inputs: ModelInputs) -> Recipe:
    """Queries that attend to a picture's features."""
    width = first(inputs.config, "hidden_size")
    return {
        "input_ids": inputs.tokens(),
        "query_embeds": Noise((ROWS, 8, width)),
        "encoder_hidden_states": Noise((ROWS, LENGTH, first(inputs.config, "encoder_hidden_size"))),
    }


def _instructblip(inputs: ModelInputs) -> Recipe:
    """One placeholder for every query; a video is one picture after the other."""
    token, queries = anywhere(inputs.config, "image_token_index"), first(inputs.config, "num_query_tokens")
    is_video = "video" in inputs.config.model_type
    frames = 4 if is_video else 1
    if is_video:
        token = anywhere(inputs.config, "video_token_index")
    length = LENGTH + frames * queries
    shape = one_picture(inputs)
    return {
        "pixel_values": Noise((ROWS, frames, *shape) if is_video else (ROWS, *shape)),
        "input_ids": inputs.tokens(length, [(2 + place, token) for place in range(frames * queries)]),
        "attention_mask": ones(ROWS, length),
        "qformer_input_ids": inputs.tokens(),
        "qformer_attention_mask": ones(ROWS, LENGTH),
        "labels": Same("input_ids"),
    }


def _idefics(inputs: ModelInputs) -> Recipe:
    """Which token sees which picture."""
    return text(inputs) | {
        "pixel_values": Noise((ROWS, 1, *one_picture(inputs))),
        "image_attention_mask": ones(ROWS, LENGTH, 1),
        "labels": Same("input_ids"),
    }


def _kosmos2(inputs: ModelInputs) -> Recipe:
    """Places for pictures are marked by a mask, not by a token."""
    queries = first(inputs.config, "latent_query_num")
    length = LENGTH + queries
    mask = torch.zeros(ROWS, length, dtype=torch.long)
    mask[:, 2 : 2 + queries] = 1
    return text(inputs, length) | {
        "pixel_values": Noise((ROWS, *one_picture(inputs))),
        "flattened_patches": flattened_patches(inputs),
        "image_embeds_position_mask": Fixed(mask),
        "labels": Same("input_ids"),
    }


def _kosmos2_5_vision(inputs: ModelInputs) -> Recipe:
    return {"flattened_patches": flattened_patches(inputs)}


def _mllama(inputs: ModelInputs) -> Recipe:
    """Pictures are cut into tiles, of which all are used, and text attends to all of them."""
    tower = vision_tower(inputs)
    tiles = first(tower, "max_num_tiles")
    return text(inputs) | {
        "pixel_values": Noise((ROWS, 1, tiles, *one_picture(inputs))),
        "aspect_ratio_ids": ones(ROWS, 1),
        "aspect_ratio_mask": ones(ROWS, 1, tiles),
        "cross_attention_mask": ones(ROWS, LENGTH, 1, tiles),
        "labels": Same("input_ids"),
    }


def _resampler(inputs: ModelInputs) -> Recipe:
    return {"context": Noise((ROWS, LENGTH, first(inputs.config, "hidden_size"))), "attention_mask": ones(ROWS, LENGTH)}


def _pictures_with_prompts(inputs: ModelInputs) -> Recipe:
    """A point on a picture, as one prompt."""
    return {
        "pixel_values": Noise((ROWS, *one_picture(inputs))),
        "input_points": Fractions((ROWS, 1, 1, 2), high=float(one_picture(inputs)[1])),
        "input_labels": ones(ROWS, 1, 1),
    }


def _pairs_of_pictures(inputs: ModelInputs) -> Recipe:
    """Two pictures in which points are matched."""
    return {"pixel_values": Noise((ROWS, 2, 3, *one_picture(inputs)[1:]))}


def _lxmert(inputs: ModelInputs) -> Recipe:
    """Objects that were found in a picture, with their boxes."""
    return text(inputs) | {
        "visual_feats": Noise((ROWS, 4, first(inputs.config, "visual_feat_dim"))),
        "visual_pos": Fractions((ROWS, 4, 4)),
        "labels": Same("input_ids"),
    }


def _visual_bert(inputs: ModelInputs) -> Recipe:
    """Features of regions of a picture behind the text; labels go over both."""
    return text(inputs) | {
        "visual_embeds": Noise((ROWS, 4, first(inputs.config, "visual_embedding_dim"))),
        "visual_attention_mask": ones(ROWS, 4),
        "labels": Integers((ROWS, LENGTH + 4), 64),
    }


def _pi0(inputs: ModelInputs) -> Recipe:
    """What a robot sees, is told, is, and does."""
    token, seen = anywhere(inputs.config, "image_token_index", "image_token_id"), GRID * GRID
    length = LENGTH + seen
    steps, actions = first(inputs.config, "chunk_size"), first(inputs.config, "max_action_dim")
    return {
        "input_ids": inputs.tokens(length, [(place, token) for place in range(seen)]),
        "attention_mask": ones(ROWS, length),
        "pixel_values": Noise((ROWS, 1, *one_picture(inputs))),
        "pixel_attention_mask": Fixed(torch.ones(ROWS, 1, dtype=torch.bool)),
        "state": Noise((ROWS, first(inputs.config, "max_state_dim"))),
        "actions": Noise((ROWS, steps, actions)),
    }


def _omdet(inputs: ModelInputs) -> Recipe:
    """The names of two classes for each picture, and a task."""
    return {
        "pixel_values": Noise((ROWS, *one_picture(inputs))),
        "classes_input_ids": Integers((2 * ROWS, LENGTH), 64, low=8),
        "classes_attention_mask": ones(2 * ROWS, LENGTH),
        "tasks_input_ids": inputs.tokens(),
        "tasks_attention_mask": ones(ROWS, LENGTH),
        "classes_structure": Fixed(torch.tensor([2] * ROWS)),
    }


def _molmo2(inputs: ModelInputs) -> Recipe:
    """Patches of each crop, and those that are pooled into each placeholder."""
    tower, token = vision_tower(inputs), anywhere(inputs.config, "image_token_id")
    width = channels(tower) * patch_size(tower) ** 2
    pooled = GRID * GRID // 4
    length = LENGTH + pooled
    marks = torch.zeros(ROWS, length, dtype=torch.long)
    marks[:, 2 : 2 + pooled] = 1
    pools = torch.arange(ROWS * GRID * GRID).view(ROWS * pooled, 4)
    return {
        "input_ids": inputs.tokens(length, [(2 + place, token) for place in range(pooled)]),
        "attention_mask": ones(ROWS, length),
        "pixel_values": Noise((ROWS, GRID * GRID, width)),
        "image_token_pooling": Fixed(pools),
        "image_grids": Fixed(torch.tensor([[GRID // 2, GRID // 2, 0, 0]] * ROWS)),
        "image_num_crops": Fixed(torch.tensor([1] * ROWS)),
        "mm_token_type_ids": Fixed(marks),
        "labels": Same("input_ids"),
    }


def _seggpt(inputs: ModelInputs) -> Recipe:
    """A picture, and another one with its mask as an example; one above the other in the model."""
    side = first(inputs.config, "image_size")[1]
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks", "labels")
    return {name: Noise((ROWS, 3, side, side)) for name in names}


def _xclip_vision(inputs: ModelInputs) -> Recipe:
    """The frames of all rows after one another."""
    return {"pixel_values": Noise((ROWS * first(inputs.config, "num_frames"), *one_picture(inputs)))}


BATCHES: dict[str, Callable[[ModelInputs], Recipe]] = {
    "blip_2_qformer": _qformer,
    "colqwen2": _colqwen2,
    "efficientloftr": _pairs_of_pictures,
    "idefics": _idefics,
    "idefics2_perceiver": _resampler,
    "instructblip": _instructblip,
    "instructblip_qformer": _qformer,
    "instructblipvideo": _instructblip,
    "instructblipvideo_qformer": _qformer,
    "kosmos-2": _kosmos2,
    "kosmos-2.5": _kosmos2,
    "kosmos_2_5_vision_model": _kosmos2_5_vision,
    "lightglue": _pairs_of_pictures,
    "lxmert": _lxmert,
    "mllama": _mllama,
    "mllama_vision_model": _mllama,
    "molmo2": _molmo2,
    "molmo2_vision": _molmo2,
    "omdet-turbo": _omdet,
    "pi0": _pi0,
    "sam": _pictures_with_prompts,
    "sam2": _pictures_with_prompts,
    "sam3_tracker": _pictures_with_prompts,
    "sam_hq": _pictures_with_prompts,
    "seggpt": _seggpt,
    "superglue": _pairs_of_pictures,
    "visual_bert": _visual_bert,
    "xclip_vision_model": _xclip_vision,
}
