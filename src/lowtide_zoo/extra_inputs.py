"""Arguments that come along with others: what a forward requires, and what makes it do more of its work.

Labels for a recipe: what the class's name says of its task, and then whatever else labels look like.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from lowtide_zoo.images import channels, flattened_patches, patch_size, picture_sizes, vision_tower
from lowtide_zoo.model_inputs import (
    LENGTH,
    ROWS,
    Boxes,
    Each,
    Fixed,
    Fractions,
    Integers,
    ModelInputs,
    Noise,
    Part,
    Recipe,
    Same,
    Tokens,
    first,
    ones,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def with_extra_inputs(inputs: ModelInputs, recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with all that is required and wanted besides, and then with no more than is required.

    Nothing, if something is required that nobody knows how to make.
    """
    required = completed(inputs, recipe, inputs.required)
    lacking = [name for name in inputs.required if name not in required]
    if lacking:
        inputs.notes.append(f"{', '.join(recipe) or 'nothing'}: lacks {', '.join(lacking)}")
        return
    wanted = completed(inputs, required, WANTED)
    if len(wanted) > len(required):
        yield wanted
    yield required


def completed(inputs: ModelInputs, recipe: Recipe, names: Iterable[str]) -> Recipe:
    """The recipe and those of the named arguments that the model takes and that can be made."""
    complete = dict(recipe)
    for name in names:
        maker = COMPANIONS.get(name)
        if name not in complete and inputs.takes(name) and maker is not None:
            part = maker(inputs, complete)
            if part is not None:
                complete[name] = part
    return complete


def _length(recipe: Recipe) -> int:
    tokens = recipe.get("input_ids")
    return tokens.length if isinstance(tokens, Tokens) else LENGTH


def _hidden(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    width = first(inputs.config, "hidden_size", "d_model", "n_embd", "embed_dim", "dim") or 64
    return Noise((ROWS, LENGTH, width))


def _encoder_hidden(inputs: ModelInputs, recipe: Recipe) -> Part:
    width = first(inputs.config, "encoder_hidden_size", "cross_attention_hidden_size")
    return Noise((ROWS, LENGTH, width)) if isinstance(width, int) else _hidden(inputs, recipe)


def _boxes(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    corners = torch.tensor([1, 2, 5, 8])
    return Fixed(corners + torch.arange(_length(recipe)).view(1, -1, 1).repeat(ROWS, 1, 1))


def _masked_patches(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    """Every other patch is masked."""
    tower = vision_tower(inputs)
    size = first(tower, "image_size", "crop_size") or 32
    side = (size if isinstance(size, int) else size[0]) // patch_size(tower)
    count = side * side
    frames = first(inputs.config, "num_frames")
    if isinstance(frames, int) and inputs.main_input != "input_ids":
        count *= frames // (first(inputs.config, "tubelet_size") or 1)
    return Fixed((torch.arange(count) % 2 == 0).repeat(ROWS, 1))


def _flattened(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return flattened_patches(inputs)


def _task(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Noise((ROWS, first(inputs.config, "task_seq_len") or LENGTH))


def _high_resolution(inputs: ModelInputs, recipe: Recipe) -> Part | None:
    """The same pictures for a second tower."""
    tower = inputs.tower("high_res_vision_config")
    if "pixel_values" not in recipe or tower is inputs.config:
        return None
    return Noise((ROWS, channels(tower), *picture_sizes(tower)[0]))


def _ones(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return ones(ROWS, _length(recipe))


def _tokens(inputs: ModelInputs, recipe: Recipe) -> Part:
    return inputs.tokens(_length(recipe))


def _true(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Fixed(value=True)


def _next_sentence(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS,), 2)


COMPANIONS: dict[str, Callable[[ModelInputs, Recipe], Part | None]] = {
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

# Objects in a picture, where they are to be found.
OBJECTS = 2


def with_labels(inputs: ModelInputs, recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with labels, as far as the model takes any, and then without."""
    if "labels" in recipe:
        yield recipe
        yield {name: part for name, part in recipe.items() if name != "labels"}
        return
    if inputs.takes("start_positions") and inputs.takes("end_positions") and not inputs.takes("labels"):
        yield recipe | {name: Integers((ROWS,), LENGTH) for name in ("start_positions", "end_positions")}
    if inputs.takes("mask_labels") and inputs.takes("class_labels"):
        yield recipe | _segments(inputs, recipe)
    if inputs.takes("labels"):
        for part in _options(inputs, recipe):
            yield recipe | {"labels": part}
    yield recipe


def _options(inputs: ModelInputs, recipe: Recipe) -> list[Part]:
    fitting = [make for pattern, make in _TASKS if re.search(pattern, inputs.class_name)]
    return [make(inputs, recipe) for make in fitting or [_words, _classes, _values]]


def _label_count(inputs: ModelInputs) -> int:
    count = first(inputs.config, "num_labels")
    return count if isinstance(count, int) else 2


def _area(recipe: Recipe) -> tuple[int, ...]:
    """The height and width of the pictures in a recipe."""
    pictures = next((part for name, part in recipe.items() if name.startswith("pixel_values")), None)
    return pictures.shape[-2:] if isinstance(pictures, Noise) else (32, 32)


def _words(inputs: ModelInputs, recipe: Recipe) -> Part:
    for name in ("decoder_input_ids", "input_ids"):
        if isinstance(recipe.get(name), Tokens):
            return Same(name)
    return inputs.tokens()


def _transcript(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS, 4), min(16, inputs.vocabulary), low=1)


def _classes(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS,), _label_count(inputs))


def _classes_of_tokens(inputs: ModelInputs, recipe: Recipe) -> Part:
    tokens = recipe.get("input_ids")
    return Integers((ROWS, tokens.length if isinstance(tokens, Tokens) else LENGTH), _label_count(inputs))


def _classes_of_pixels(inputs: ModelInputs, recipe: Recipe) -> Part:
    return Integers((ROWS, *_area(recipe)), _label_count(inputs))


def _values(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Fractions((ROWS, _label_count(inputs)))


def _depths(inputs: ModelInputs, recipe: Recipe) -> Part:  # noqa: ARG001
    return Fractions((ROWS, *_area(recipe)), 0.1)


def _objects(inputs: ModelInputs, recipe: Recipe) -> Part:
    entry: dict[str, Part] = {"class_labels": Integers((OBJECTS,), _label_count(inputs)), "boxes": Boxes(OBJECTS)}
    if "Segmentation" in inputs.class_name:
        entry["masks"] = Fixed(_masks(_area(recipe)))
    return Each(ROWS, entry)


def _masks(area: tuple[int, ...]) -> torch.Tensor:
    """The left half of the picture, and the right half."""
    left = (torch.arange(area[-1]) < area[-1] // 2).expand(area)
    return torch.stack([left, ~left]).float()


def _segments(inputs: ModelInputs, recipe: Recipe) -> Recipe:
    return {
        "mask_labels": Each(ROWS, Fixed(_masks(_area(recipe)))),
        "class_labels": Each(ROWS, Integers((OBJECTS,), _label_count(inputs))),
    }


_TASKS: tuple[tuple[str, Callable[[ModelInputs, Recipe], Part]], ...] = (
    ("ObjectDetection|(Detr|Instance).*Segmentation", _objects),
    ("SemanticSegmentation", _classes_of_pixels),
    ("DepthEstimation", _depths),
    ("TokenClassification|FrameClassification", _classes_of_tokens),
    ("(Sequence|Image|Video|Audio)Classification|MultipleChoice|XVector|VisualReasoning", _classes),
    ("ForCTC|ForRNNT|ForTDT", _transcript),
    ("CausalLM|LMHead|ConditionalGeneration|MaskedLM|PreTraining", _words),
)
