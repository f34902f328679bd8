"""Proposes layouts of images and videos: whole, as patches in one sequence, or as patches with their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide_zoo.classes import first_field, nested_field
from lowtide_zoo.model_inputs import ROWS, Fixed, ModelInputs, Noise, Part, PositionedPatches, Recipe, ones

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# Images that are cut into patches have this many of them in a row and in a column.
GRID = 4

_FRAMES = 4

_TOWERS = (
    "vision_config",
    "visual_config",
    "image_encoder_config",
    "image_config",
    "encoder_config",
    "backbone_config",
    "perception_config",
    "encoder",
    "vision_encoder_config",
    "question_encoder",
)

# Sides to try where a configuration names none.
_COMMON_SIZES = (32, 64, 128, 224)


def image_layouts(inputs: ModelInputs, name: str, arguments: Collection[str]) -> Iterator[Recipe]:
    """Yield layouts of images as the argument `name`, the most specific first.

    Each brings along what it needs of `arguments`: grids, sizes, positions or masks.
    """
    tower = vision_tower(inputs)
    yield from _patches_with_grid(tower, name, arguments)
    yield from _patches_with_positions(tower, name, arguments)
    yield from _packed_patches(tower, name, arguments)
    colours = channels(tower)
    for height, width in image_sizes(tower):
        yield from _whole(name, (colours, height, width), arguments)
    frames = first_field(tower, "num_frames", "frames_per_clip") or _FRAMES
    for height, width in image_sizes(tower)[:2]:
        yield {name: Noise((ROWS, frames, colours, height, width))}
        yield {name: Noise((ROWS, colours, frames, height, width))}


def vision_tower(inputs: ModelInputs) -> Any:
    """Return the configuration of the tower that takes images."""
    return inputs.tower(*_TOWERS)


def image_shape(inputs: ModelInputs) -> tuple[int, int, int]:
    """Return the channels, height and width of an image."""
    tower = vision_tower(inputs)
    height, width = image_sizes(tower)[0]
    return channels(tower), height, width


def image_sizes(tower: Any) -> list[tuple[int, int]]:
    """List heights and widths to try: the configured ones, then common ones."""
    size = nested_field(tower, "image_size", "input_size", "img_size", "crop_size", "spec_size")
    sizes = [(size, size)] if isinstance(size, int) else [tuple(size)] if isinstance(size, list | tuple) else []
    if isinstance(size, dict):
        sizes = [(size["height"], size["width"])]
    pairs = [pair for pair in sizes if len(pair) == len(("height", "width"))]
    return list(dict.fromkeys(pairs + [(side, side) for side in _COMMON_SIZES]))[:4]


def channels(tower: Any) -> int:
    """Return the number of channels of an image, three where the configuration does not say."""
    found = first_field(tower, "num_channels", "in_channels", "in_chans")
    return found if isinstance(found, int) else 3


def patch_size(tower: Any) -> int:
    """Return the side of a patch, eight where the configuration does not say."""
    size = first_field(tower, "patch_size")
    return size if isinstance(size, int) else size[0] if isinstance(size, list | tuple) else 8


def flattened_patches(inputs: ModelInputs) -> Part:
    """Describe patches with their row and column, counted from one, in front."""
    tower = vision_tower(inputs)
    return PositionedPatches(ROWS, GRID, channels(tower) * patch_size(tower) ** 2)


def _whole(name: str, shape: tuple[int, int, int], arguments: Collection[str]) -> Iterator[Recipe]:
    size = Fixed(torch.tensor([shape[1:]] * ROWS))
    if "pixel_attention_mask" in arguments:
        mask = Fixed(torch.ones(ROWS, 1, *shape[1:], dtype=torch.bool))
        yield {name: Noise((ROWS, 1, *shape)), "pixel_attention_mask": mask}
    if "image_sizes" in arguments:
        # An image as a whole and its four quarters.
        yield {name: Noise((ROWS, 5, *shape)), "image_sizes": Fixed(2 * torch.tensor([shape[1:]] * ROWS))}
        yield {name: Noise((ROWS, *shape)), "image_sizes": size}
    yield {name: Noise((ROWS, *shape))}
    yield {name: Noise((ROWS, 1, *shape))}


def _patches_with_grid(tower: Any, name: str, arguments: Collection[str]) -> Iterator[Recipe]:
    """Yield the patches of all images in one sequence, with the grid of each image."""
    kind = "video" if "video" in name else "image"
    grids = {f"{kind}_grid_thw": 3, "grid_thw": 3, "image_grid_hws": 2, "image_grid_hw": 2, "grid_hws": 2}
    grid = next((grid for grid in grids if grid in arguments), None)
    if grid is None:
        return
    sides = (1, GRID, GRID)[-grids[grid] :]
    side, colours = patch_size(tower), channels(tower)
    depth = first_field(tower, "temporal_patch_size", "patch_temporal") or 1
    extra: Recipe = {grid: Fixed(torch.tensor([sides] * ROWS))}
    for merges in (f"{kind}_merge_sizes", "merge_sizes"):
        if merges in arguments:
            extra[merges] = Fixed(torch.tensor([1] * ROWS))
    count = ROWS * GRID * GRID
    for shape in (
        (count, colours * depth * side * side),
        (count, colours, side, side),
        (1, count, colours, side, side),
    ):
        yield {name: Noise(shape), **extra}


def _patches_with_positions(tower: Any, name: str, arguments: Collection[str]) -> Iterator[Recipe]:
    """Yield the patches of each image in a row, with the position of each patch or the shape of each image."""
    side, colours = first_field(tower, "model_patch_size") or patch_size(tower), channels(tower)
    patches = Noise((ROWS, GRID * GRID, colours * side * side))
    if "spatial_shapes" in arguments:
        yield {
            name: patches,
            "pixel_attention_mask": ones(ROWS, GRID * GRID),
            "spatial_shapes": Fixed(torch.tensor([[GRID, GRID]] * ROWS)),
        }
    columns_and_rows = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="xy")
    positions = torch.stack(columns_and_rows, dim=-1).view(1, -1, 2)
    for argument in ("image_position_ids", "pixel_position_ids"):
        if argument in arguments:
            yield {name: patches, argument: Fixed(positions.repeat(ROWS, 1, 1))}


def _packed_patches(tower: Any, name: str, arguments: Collection[str]) -> Iterator[Recipe]:
    """Yield the patches of all images side by side, as one image that is a patch high."""
    sizes = "target_sizes_videos" if "video" in name else "target_sizes"
    if sizes in arguments:
        side = patch_size(tower)
        strip = Noise((1, channels(tower), side, ROWS * GRID * GRID * side))
        yield {name: strip, sizes: Fixed(torch.tensor([[GRID, GRID]] * ROWS))}
