"""Describes the image batches of single architectures whose arguments do not say what belongs together.

Each function makes the recipe of one architecture, or of several alike, and its docstring says what is special. The
functions are entered in `BATCHES` by model type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide_zoo.classes import first_field, nested_field
from lowtide_zoo.images import GRID, channels, flattened_patches, image_shape, patch_size, vision_tower
from lowtide_zoo.model_inputs import (
    LENGTH,
    ROWS,
    CopyOf,
    Fixed,
    Integers,
    ModelInputs,
    Noise,
    Recipe,
    Uniform,
    ones,
    text_recipe,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _colqwen2(inputs: ModelInputs) -> Recipe:
    """Give every row its own patches: ColQwen2 pads them to one length and does not concatenate the rows."""
    tower = vision_tower(inputs)
    token, side = nested_field(inputs.config, "image_token_id"), patch_size(tower)
    width = channels(tower) * first_field(tower, "temporal_patch_size") * side * side
    placeholders = GRID * GRID // first_field(tower, "spatial_merge_size") ** 2
    return {
        "input_ids": inputs.tokens(LENGTH, [(2 + position, token) for position in range(placeholders)]),
        "attention_mask": ones(ROWS, LENGTH),
        "pixel_values": Noise((ROWS, GRID * GRID, width)),
        "image_grid_thw": Fixed(torch.tensor([[1, GRID, GRID]] * ROWS)),
    }


def _qformer(inputs: ModelInputs) -> Recipe:
    """Give queries, and the image features that they attend to."""
    width = first_field(inputs.config, "hidden_size")
    return {
        "input_ids": inputs.tokens(),
        "query_embeds": Noise((ROWS, 8, width)),
        "encoder_hidden_states": Noise((ROWS, LENGTH, first_field(inputs.config, "encoder_hidden_size"))),
    }


def _instructblip(inputs: ModelInputs) -> Recipe:
    """Insert one placeholder per query and image; a video is one image after the other."""
    token, queries = nested_field(inputs.config, "image_token_index"), first_field(inputs.config, "num_query_tokens")
    is_video = "video" in inputs.config.model_type
    frames = 4 if is_video else 1
    if is_video:
        token = nested_field(inputs.config, "video_token_index")
    length = LENGTH + frames * queries
    shape = image_shape(inputs)
    return {
        "pixel_values": Noise((ROWS, frames, *shape) if is_video else (ROWS, *shape)),
        "input_ids": inputs.tokens(length, [(2 + position, token) for position in range(frames * queries)]),
        "attention_mask": ones(ROWS, length),
        "qformer_input_ids": inputs.tokens(),
        "qformer_attention_mask": ones(ROWS, LENGTH),
        "labels": CopyOf("input_ids"),
    }


def _idefics(inputs: ModelInputs) -> Recipe:
    """Add a mask that says which token sees which image."""
    return text_recipe(inputs) | {
        "pixel_values": Noise((ROWS, 1, *image_shape(inputs))),
        "image_attention_mask": ones(ROWS, LENGTH, 1),
        "labels": CopyOf("input_ids"),
    }


def _kosmos2(inputs: ModelInputs) -> Recipe:
    """Mark the positions of the image features by a mask: there is no placeholder token."""
    queries = first_field(inputs.config, "latent_query_num")
    length = LENGTH + queries
    mask = torch.zeros(ROWS, length, dtype=torch.long)
    mask[:, 2 : 2 + queries] = 1
    return text_recipe(inputs, length) | {
        "pixel_values": Noise((ROWS, *image_shape(inputs))),
        "flattened_patches": flattened_patches(inputs),
        "image_embeds_position_mask": Fixed(mask),
        "labels": CopyOf("input_ids"),
    }


def _kosmos2_5_vision(inputs: ModelInputs) -> Recipe:
    """Give patches with their positions, which the tower does not take under the name of an image."""
    return {"flattened_patches": flattened_patches(inputs)}


def _mllama(inputs: ModelInputs) -> Recipe:
    """Cut images into tiles, all of which are used, and let the text attend to all of them."""
    tower = vision_tower(inputs)
    tiles = first_field(tower, "max_num_tiles")
    return text_recipe(inputs) | {
        "pixel_values": Noise((ROWS, 1, tiles, *image_shape(inputs))),
        "aspect_ratio_ids": ones(ROWS, 1),
        "aspect_ratio_mask": ones(ROWS, 1, tiles),
        "cross_attention_mask": ones(ROWS, LENGTH, 1, tiles),
        "labels": CopyOf("input_ids"),
    }


def _resampler(inputs: ModelInputs) -> Recipe:
    """Give a context of image features to resample."""
    return {
        "context": Noise((ROWS, LENGTH, first_field(inputs.config, "hidden_size"))),
        "attention_mask": ones(ROWS, LENGTH),
    }


def _images_with_prompts(inputs: ModelInputs) -> Recipe:
    """Prompt each image with one point on it."""
    return {
        "pixel_values": Noise((ROWS, *image_shape(inputs))),
        "input_points": Uniform((ROWS, 1, 1, 2), high=float(image_shape(inputs)[1])),
        "input_labels": ones(ROWS, 1, 1),
    }


def _pairs_of_images(inputs: ModelInputs) -> Recipe:
    """Give two images per row, whose points are matched."""
    return {"pixel_values": Noise((ROWS, 2, 3, *image_shape(inputs)[1:]))}


def _lxmert(inputs: ModelInputs) -> Recipe:
    """Give the features of objects that were found in an image, with their boxes."""
    return text_recipe(inputs) | {
        "visual_feats": Noise((ROWS, 4, first_field(inputs.config, "visual_feat_dim"))),
        "visual_pos": Uniform((ROWS, 4, 4)),
        "labels": CopyOf("input_ids"),
    }


def _visual_bert(inputs: ModelInputs) -> Recipe:
    """Put features of image regions behind the text; the labels cover both."""
    return text_recipe(inputs) | {
        "visual_embeds": Noise((ROWS, 4, first_field(inputs.config, "visual_embedding_dim"))),
        "visual_attention_mask": ones(ROWS, 4),
        "labels": Integers((ROWS, LENGTH + 4), 64),
    }


def _pi0(inputs: ModelInputs) -> Recipe:
    """Give what a robot sees, what it is told, its state, and its actions."""
    token, features = nested_field(inputs.config, "image_token_index", "image_token_id"), GRID * GRID
    length = LENGTH + features
    steps, actions = first_field(inputs.config, "chunk_size"), first_field(inputs.config, "max_action_dim")
    return {
        "input_ids": inputs.tokens(length, [(position, token) for position in range(features)]),
        "attention_mask": ones(ROWS, length),
        "pixel_values": Noise((ROWS, 1, *image_shape(inputs))),
        "pixel_attention_mask": Fixed(torch.ones(ROWS, 1, dtype=torch.bool)),
        "state": Noise((ROWS, first_field(inputs.config, "max_state_dim"))),
        "actions": Noise((ROWS, steps, actions)),
    }


def _omdet(inputs: ModelInputs) -> Recipe:
    """Give the names of two classes for each image, and a task."""
    return {
        "pixel_values": Noise((ROWS, *image_shape(inputs))),
        "classes_input_ids": Integers((2 * ROWS, LENGTH), 64, low=8),
        "classes_attention_mask": ones(2 * ROWS, LENGTH),
        "tasks_input_ids": inputs.tokens(),
        "tasks_attention_mask": ones(ROWS, LENGTH),
        "classes_structure": Fixed(torch.tensor([2] * ROWS)),
    }


def _molmo2(inputs: ModelInputs) -> Recipe:
    """Give the patches of each crop, and which of them are pooled into which placeholder."""
    tower, token = vision_tower(inputs), nested_field(inputs.config, "image_token_id")
    width = channels(tower) * patch_size(tower) ** 2
    pooled = GRID * GRID // 4
    length = LENGTH + pooled
    marks = torch.zeros(ROWS, length, dtype=torch.long)
    marks[:, 2 : 2 + pooled] = 1
    pools = torch.arange(ROWS * GRID * GRID).view(ROWS * pooled, 4)
    return {
        "input_ids": inputs.tokens(length, [(2 + position, token) for position in range(pooled)]),
        "attention_mask": ones(ROWS, length),
        "pixel_values": Noise((ROWS, GRID * GRID, width)),
        "image_token_pooling": Fixed(pools),
        "image_grids": Fixed(torch.tensor([[GRID // 2, GRID // 2, 0, 0]] * ROWS)),
        "image_num_crops": Fixed(torch.tensor([1] * ROWS)),
        "mm_token_type_ids": Fixed(marks),
        "labels": CopyOf("input_ids"),
    }


def _seggpt(inputs: ModelInputs) -> Recipe:
    """Give an image, and an example image with its mask; the model stacks them one above the other."""
    side = first_field(inputs.config, "image_size")[1]
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks", "labels")
    return {name: Noise((ROWS, 3, side, side)) for name in names}


def _xclip_vision(inputs: ModelInputs) -> Recipe:
    """Concatenate the frames of all rows."""
    return {"pixel_values": Noise((ROWS * first_field(inputs.config, "num_frames"), *image_shape(inputs)))}


BATCHES: dict[str, Callable[[ModelInputs], Recipe]] = {
    "blip_2_qformer": _qformer,
    "colqwen2": _colqwen2,
    "efficientloftr": _pairs_of_images,
    "idefics": _idefics,
    "idefics2_perceiver": _resampler,
    "instructblip": _instructblip,
    "instructblip_qformer": _qformer,
    "instructblipvideo": _instructblip,
    "instructblipvideo_qformer": _qformer,
    "kosmos-2": _kosmos2,
    "kosmos-2.5": _kosmos2,
    "kosmos_2_5_vision_model": _kosmos2_5_vision,
    "lightglue": _pairs_of_images,
    "lxmert": _lxmert,
    "mllama": _mllama,
    "mllama_vision_model": _mllama,
    "molmo2": _molmo2,
    "molmo2_vision": _molmo2,
    "omdet-turbo": _omdet,
    "pi0": _pi0,
    "sam": _images_with_prompts,
    "sam2": _images_with_prompts,
    "sam3_tracker": _images_with_prompts,
    "sam_hq": _images_with_prompts,
    "seggpt": _seggpt,
    "superglue": _pairs_of_images,
    "visual_bert": _visual_bert,
    "xclip_vision_model": _xclip_vision,
}
