"""Completes a recipe: what the forward requires, what makes it do more of its work, and labels.

Extra inputs are made by the names of the arguments. Labels are made by what the class's name says about its task, and
where it says nothing, by trying what labels usually look like.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from lowtide_zoo.classes import first_field
from lowtide_zoo.images import channels, flattened_patches, image_sizes, patch_size, vision_tower
from lowtide_zoo.model_inputs import (
    LENGTH,
    ROWS,
    Boxes,
    CopyOf,
    Fixed,
    Integers,
    ModelInputs,
    Noise,
    Part,
    PerSample,
    Recipe,
    Tokens,
    Uniform,
    ones,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Optional, and given whenever they are taken: without them, a part of the model or of its loss stays idle.
_WANTED = (
    "flattened_patches",
    "high_res_pixel_values",
    "bbox",
    "bool_masked_pos",
    "return_loss",
    "next_sentence_label",
    "sentence_order_label",
)

# The objects to be found in an image.
_OBJECTS = 2


def with_extra_inputs(inputs: ModelInputs, recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with everything that is required or wanted besides, then with no more than is required.

    Yields nothing if an argument is required that nobody knows how to make.
    """
    required = completed(inputs, recipe, inputs.required)
    lacking = [name for name in inputs.required if name not in required]
    if lacking:
        inputs.notes.append(f"{', '.join(recipe) or 'nothing'}: lacks {', '.join(lacking)}")
        return
    wanted = completed(inputs, required, _WANTED)
    if len(wanted) > len(required):
        yield wanted
    yield required


def completed(inputs: ModelInputs, recipe: Recipe, names: Iterable[str]) -> Recipe:
    """Add those of the named arguments that the model takes and that can be made."""
    complete = dict(recipe)
    for name in names:
        maker = _MAKERS.get(name)
        if name not in complete and inputs.takes(name) and maker is not None:
            part = maker(inputs, complete)
            if part is not None:
                complete[name] = part
    return complete


def with_labels(inputs: ModelInputs, recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with labels, as far as the model takes any, and then without."""
    if "labels" in recipe:
        yield recipe
        yield {name: part for name, part in recipe.items() if name != "labels"}
        return
    if inputs.takes("start_positions") and inputs.takes("end_positions") and not inputs.takes("labels"):
        yield recipe | {name: Integers((ROWS,), LENGTH) for name in ("start_positions", "end_positions")}
    if inputs.takes("mask_labels") and inputs.takes("class_labels"):
        yield recipe | _segments(inputs, recipe)
    if inputs.takes("labels"):
        for part in _label_options(inputs, recipe):
            yield recipe | {"labels": part}
    yield recipe


def _length(recipe: Recipe) -> int:
    tokens = recipe.get("input_ids")
    return tokens.length if isinstance(tokens, Tokens) else LENGTH


def _image_area(recipe: Recipe) -> tuple[int, ...]:
    """Return the height and width of the images in a recipe."""
    images = next((part for name, part in recipe.items() if name.startswith("pixel_values")), None)
    return images.shape[-2:] if isinstance(images, Noise) else (32, 32)


def _hidden(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    width = first_field(inputs.config, "hidden_size", "d_model", "n_embd", "embed_dim", "dim") or 64
    return Noise((ROWS, LENGTH, width))


def _encoder_hidden(inputs: ModelInputs, recipe: Recipe) -> Part:
    width = first_field(inputs.config, "encoder_hidden_size", "cross_attention_hidden_size")
    return Noise((ROWS, LENGTH, width)) if isinstance(width, int) else _hidden(inputs, recipe)


def _boxes_of_tokens(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    corners = torch.tensor([1, 2, 5, 8])
    return Fixed(corners + torch.arange(_length(recipe)).view(1, -1, 1).repeat(ROWS, 1, 1))


def _masked_patches(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    """Mask every second patch."""
    tower = vision_tower(inputs)
    size = first_field(tower, "image_size", "crop_size") or 32
    side = (size if isinstance(size, int) else size[0]) // patch_size(tower)
    count = side * side
    frames = first_field(inputs.config, "num_frames")
    if isinstance(frames, int) and inputs.main_input != "input_ids":
        count *= frames // (first_field(inputs.config, "tubelet_size") or 1)
    return Fixed((torch.arange(count) % 2 == 0).repeat(ROWS, 1))


def _flattened_patches(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return flattened_patches(inputs)


def _task(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Noise((ROWS, first_field(inputs.config, "task_seq_len") or LENGTH))


def _high_resolution(inputs: ModelInputs, recipe: Recipe) -> Part | None:
    """Give the images to a second tower, too, if there is one."""
    tower = inputs.tower("high_res_vision_config")
    if "pixel_values" not in recipe or tower is inputs.config:
        return None
    return Noise((ROWS, channels(tower), *image_sizes(tower)[0]))


def _ones(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return ones(ROWS, _length(recipe))


def _tokens(inputs: ModelInputs, recipe: Recipe) -> Part:
    return inputs.tokens(_length(recipe))


def _true(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Fixed(value=True)


def _next_sentence(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS,), 2)


_MAKERS: dict[str, Callable[[ModelInputs, Recipe], Part | None]] = {
    "attention_mask": _ones,
    "bbox": _boxes_of_tokens,
    "bool_masked_pos": _masked_patches,
    "decoder_input_ids": _tokens,
    "encoder_hidden_states": _encoder_hidden,
    "flattened_patches": _flattened_patches,
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


def _label_options(inputs: ModelInputs, recipe: Recipe) -> list[Part]:
    makers = [make for pattern, make in _TASKS if re.search(pattern, inputs.class_name)]
    return [make(inputs, recipe) for make in makers or [_words, _classes, _values]]


def _label_count(inputs: ModelInputs) -> int:
    count = first_field(inputs.config, "num_labels")
    return count if isinstance(count, int) else 2


def _words(inputs: ModelInputs, recipe: Recipe) -> Part:
    for name in ("decoder_input_ids", "input_ids"):
        if isinstance(recipe.get(name), Tokens):
            return CopyOf(name)
    return inputs.tokens()


def _transcript(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS, 4), min(16, inputs.vocabulary), low=1)


def _classes(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS,), _label_count(inputs))


def _classes_of_tokens(inputs: ModelInputs, recipe: Recipe) -> Part:
    return Integers((ROWS, _length(recipe)), _label_count(inputs))


def _classes_of_pixels(inputs: ModelInputs, recipe: Recipe) -> Part:
    return Integers((ROWS, *_image_area(recipe)), _label_count(inputs))


def _values(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Uniform((ROWS, _label_count(inputs)))


def _depths(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Uniform((ROWS, *_image_area(recipe)), 0.1)


def _objects(inputs: ModelInputs, recipe: Recipe) -> Part:
    entry: dict[str, Part] = {"class_labels": Integers((_OBJECTS,), _label_count(inputs)), "boxes": Boxes(_OBJECTS)}
    if "Segmentation" in inputs.class_name:
        entry["masks"] = Fixed(_masks(_image_area(recipe)))
    return PerSample(ROWS, entry)


def _segments(inputs: ModelInputs, recipe: Recipe) -> Recipe:
    return {
        "mask_labels": PerSample(ROWS, Fixed(_masks(_image_area(recipe)))),
        "class_labels": PerSample(ROWS, Integers((_OBJECTS,), _label_count(inputs))),
    }


def _masks(area: tuple[int, ...]) -> torch.Tensor:
    """Return a mask of an image's left half, and one of its right half."""
    left = (torch.arange(area[-1]) < area[-1] // 2).expand(area)
    return torch.stack([left, ~left]).float()


_TASKS: tuple[tuple[str, Callable[[ModelInputs, Recipe], Part]], ...] = (
    ("ObjectDetection|(Detr|Instance).*Segmentation", _objects),
    ("SemanticSegmentation", _classes_of_pixels),
    ("DepthEstimation", _depths),
    ("TokenClassification|FrameClassification", _classes_of_tokens),
    ("(Sequence|Image|Video|Audio)Classification|MultipleChoice|XVector|VisualReasoning", _classes),
    ("ForCTC|ForRNNT|ForTDT", _transcript),
    ("CausalLM|LMHead|ConditionalGeneration|MaskedLM|PreTraining", _words),
)
