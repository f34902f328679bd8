"""Pictures and videos, in the layouts that models take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide_zoo.model_inputs import ROWS, Fixed, ModelInputs, Noise, Part, PlacedPatches, Recipe, anywhere, first, ones

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# Pictures cut into patches have this many of them in a row and in a column.
GRID = 4

FRAMES = 4

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

_SIZES = (32, 64, 128, 224)


def vision_tower(inputs: ModelInputs) -> Any:
    """The configuration of whatever looks at pictures."""
    return inputs.tower(*_TOWERS)


def picture_sizes(tower: Any) -> list[tuple[int, int]]:
    """Height and width: as configured, or some that are common."""
    size = anywhere(tower, "image_size", "input_size", "img_size", "crop_size", "spec_size")
    sizes = [(size, size)] if isinstance(size, int) else [tuple(size)] if isinstance(size, list | tuple) else []
    if isinstance(size, dict):
        sizes = [(size["height"], size["width"])]
    return list(
        dict.fromkeys([pair for pair in sizes if len(pair) == len(("height", "width"))] + [(s, s) for s in _SIZES])
    )[:4]


def one_picture(inputs: ModelInputs) -> tuple[int, int, int]:
    """The shape of a picture."""
    tower = vision_tower(inputs)
    height, width = picture_sizes(tower)[0]
    return channels(tower), height, width


def flattened_patches(inputs: ModelInputs) -> Part:
    """Patches with their row and column, counted from one, in front."""
    tower = vision_tower(inputs)
    return PlacedPatches(ROWS, GRID, channels(tower) * patch_size(tower) ** 2)


def channels(tower: Any) -> int:
    """Colours, mostly."""
    found = first(tower, "num_channels", "in_channels", "in_chans")
    return found if isinstance(found, int) else 3


def pictures(inputs: ModelInputs, name: str, takes: Collection[str]) -> Iterator[Recipe]:
    """Layouts of pictures as the argument `name`, with the companions among what is taken, the most telling first."""
    tower = vision_tower(inputs)
    yield from _patches_with_grid(tower, name, takes)
    yield from _patches_with_places(tower, name, takes)
    yield from _packed_patches(tower, name, takes)
    colours = channels(tower)
    for height, width in picture_sizes(tower):
        yield from _whole(name, (colours, height, width), takes)
    frames = first(tower, "num_frames", "frames_per_clip") or FRAMES
    for height, width in picture_sizes(tower)[:2]:
        yield {name: Noise((ROWS, frames, colours, height, width))}
        yield {name: Noise((ROWS, colours, frames, height, width))}


def _whole(name: str, shape: tuple[int, int, int], takes: Collection[str]) -> Iterator[Recipe]:
    size = Fixed(torch.tensor([shape[1:]] * ROWS))
    if "pixel_attention_mask" in takes:
        mask = Fixed(torch.ones(ROWS, 1, *shape[1:], dtype=torch.bool))
        yield {name: Noise((ROWS, 1, *shape)), "pixel_attention_mask": mask}
    if "image_sizes" in takes:
        # A picture as a whole and its four quarters.
        yield {name: Noise((ROWS, 5, *shape)), "image_sizes": Fixed(2 * torch.tensor([shape[1:]] * ROWS))}
        yield {name: Noise((ROWS, *shape)), "image_sizes": size}
    yield {name: Noise((ROWS, *shape))}
    yield {name: Noise((ROWS, 1, *shape))}


def patch_size(tower: Any) -> int:
    """The side of a patch."""
    size = first(tower, "patch_size")
    return size if isinstance(size, int) else size[0] if isinstance(size, list | tuple) else 8


def _patches_with_grid(tower: Any, name: str, takes: Collection[str]) -> Iterator[Recipe]:
    """Patches of all pictures in one sequence, and the grid of each picture."""
    kind = "video" if "video" in name else "image"
    grids = {f"{kind}_grid_thw": 3, "grid_thw": 3, "image_grid_hws": 2, "image_grid_hw": 2, "grid_hws": 2}
    grid = next((grid for grid in grids if grid in takes), None)
    if grid is None:
        return
    sides = (1, GRID, GRID)[-grids[grid] :]
    side, colours = patch_size(tower), channels(tower)
    depth = first(tower, "temporal_patch_size", "patch_temporal") or 1
    extra: Recipe = {grid: Fixed(torch.tensor([sides] * ROWS))}
    for merges in (f"{kind}_merge_sizes", "merge_sizes"):
        if merges in takes:
            extra[merges] = Fixed(torch.tensor([1] * ROWS))
    count = ROWS * GRID * GRID
    for shape in (
        (count, colours * depth * side * side),
        (count, colours, side, side),
        (1, count, colours, side, side),
    ):
        yield {name: Noise(shape), **extra}


def _packed_patches(tower: Any, name: str, takes: Collection[str]) -> Iterator[Recipe]:
    """Patches of all pictures side by side, as one picture that is a patch high."""
    sizes = "target_sizes_videos" if "video" in name else "target_sizes"
    if sizes in takes:
        side = patch_size(tower)
        strip = Noise((1, channels(tower), side, ROWS * GRID * GRID * side))
        yield {name: strip, sizes: Fixed(torch.tensor([[GRID, GRID]] * ROWS))}


def _patches_with_places(tower: Any, name: str, takes: Collection[str]) -> Iterator[Recipe]:
    """Patches of each picture by themselves, with the place of each."""
    side, colours = first(tower, "model_patch_size") or patch_size(tower), channels(tower)
    patches = Noise((ROWS, GRID * GRID, colours * side * side))
    if "spatial_shapes" in takes:
        yield {
            name: patches,
            "pixel_attention_mask": ones(ROWS, GRID * GRID),
            "spatial_shapes": Fixed(torch.tensor([[GRID, GRID]] * ROWS)),
        }
    places = torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="xy"), dim=-1).view(1, -1, 2)
    for argument in ("image_position_ids", "pixel_position_ids"):
        if argument in takes:
            yield {name: patches, argument: Fixed(places.repeat(ROWS, 1, 1))}
