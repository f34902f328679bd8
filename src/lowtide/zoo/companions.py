"""Arguments that come along with others: what a forward requires, and what makes it do more of its work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide.zoo.parts import Fixed, Integers, Noise, Part, Recipe, Tokens
from lowtide.zoo.scene import LENGTH, ROWS, Scene, first, ones
from lowtide.zoo.vision import channels, flattened_patches, patch_size, picture_sizes, vision_tower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def with_companions(scene: Scene, recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with all that is required and wanted besides, and then with no more than is required.

    Nothing, if something is required that nobody knows how to make.
    """
    required = completed(scene, recipe, scene.required)
    lacking = [name for name in scene.required if name not in required]
    if lacking:
        scene.notes.append(f"{', '.join(recipe) or 'nothing'}: lacks {', '.join(lacking)}")
        return
    wanted = completed(scene, required, WANTED)
    if len(wanted) > len(required):
        yield wanted
    yield required


def completed(scene: Scene, recipe: Recipe, names: Iterable[str]) -> Recipe:
    """The recipe and those of the named arguments that the model takes and that can be made."""
    complete = dict(recipe)
    for name in names:
        maker = COMPANIONS.get(name)
        if name not in complete and scene.takes(name) and maker is not None:
            part = maker(scene, complete)
            if part is not None:
                complete[name] = part
    return complete


def _length(recipe: Recipe) -> int:
    tokens = recipe.get("input_ids")
    return tokens.length if isinstance(tokens, Tokens) else LENGTH


def _hidden(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    width = first(scene.config, "hidden_size", "d_model", "n_embd", "embed_dim", "dim") or 64
    return Noise((ROWS, LENGTH, width))


def _encoder_hidden(scene: Scene, recipe: Recipe) -> Part:
    width = first(scene.config, "encoder_hidden_size", "cross_attention_hidden_size")
    return Noise((ROWS, LENGTH, width)) if isinstance(width, int) else _hidden(scene, recipe)


def _boxes(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    corners = torch.tensor([1, 2, 5, 8])
    return Fixed(corners + torch.arange(_length(recipe)).view(1, -1, 1).repeat(ROWS, 1, 1))


def _masked_patches(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    """Every other patch is masked."""
    tower = vision_tower(scene)
    size = first(tower, "image_size", "crop_size") or 32
    side = (size if isinstance(size, int) else size[0]) // patch_size(tower)
    count = side * side
    frames = first(scene.config, "num_frames")
    if isinstance(frames, int) and scene.main_input != "input_ids":
        count *= frames // (first(scene.config, "tubelet_size") or 1)
    return Fixed((torch.arange(count) % 2 == 0).repeat(ROWS, 1))


def _flattened(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return flattened_patches(scene)


def _task(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return Noise((ROWS, first(scene.config, "task_seq_len") or LENGTH))


def _high_resolution(scene: Scene, recipe: Recipe) -> Part | None:
    """The same pictures for a second tower."""
    tower = scene.tower("high_res_vision_config")
    if "pixel_values" not in recipe or tower is scene.config:
        return None
    return Noise((ROWS, channels(tower), *picture_sizes(tower)[0]))


def _ones(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return ones(ROWS, _length(recipe))


def _tokens(scene: Scene, recipe: Recipe) -> Part:
    return scene.tokens(_length(recipe))


def _true(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return Fixed(value=True)


def _next_sentence(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS,), 2)


COMPANIONS: dict[str, Callable[[Scene, Recipe], Part | None]] = {
    "attention_mask": _ones,
    "bbox": _boxes,
    "bool_masked_pos": _masked_patches,
    "decoder_input_ids": _tokens,
    "encoder_hidden_states": _encoder_hidden,
    "flattened_patches": _flattened,
    "high_res_pixel_values": _high_resolution,
    "hidden_states": _hidden,
    "task_inputs": _task,
    "inputs_embeds": _hidden,
    "next_sentence_label": _next_sentence,
    "qformer_input_ids": _tokens,
    "query_embeds": _hidden,
    "return_loss": _true,
    "sentence_order_label": _next_sentence,
}
# Optional, and given whenever they are taken: without them, a part of the model or of its loss stays idle.
WANTED = (
    "flattened_patches",
    "high_res_pixel_values",
    "bbox",
    "bool_masked_pos",
    "return_loss",
    "next_sentence_label",
    "sentence_order_label",
)
