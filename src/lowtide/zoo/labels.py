"""Labels for a recipe: what the class's name says of its task, and then whatever else labels look like."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from lowtide.zoo.parts import Boxes, Each, Fixed, Fractions, Integers, Noise, Part, Recipe, Same, Tokens
from lowtide.zoo.scene import LENGTH, ROWS, Scene, first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Objects in a picture, where they are to be found.
OBJECTS = 2


def with_labels(scene: Scene, recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with labels, as far as the model takes any, and then without."""
    if "labels" in recipe:
        yield recipe
        yield {name: part for name, part in recipe.items() if name != "labels"}
        return
    if scene.takes("start_positions") and scene.takes("end_positions") and not scene.takes("labels"):
        yield recipe | {name: Integers((ROWS,), LENGTH) for name in ("start_positions", "end_positions")}
    if scene.takes("mask_labels") and scene.takes("class_labels"):
        yield recipe | _segments(scene, recipe)
    if scene.takes("labels"):
        for part in _options(scene, recipe):
            yield recipe | {"labels": part}
    yield recipe


def _options(scene: Scene, recipe: Recipe) -> list[Part]:
    fitting = [make for pattern, make in _TASKS if re.search(pattern, scene.class_name)]
    return [make(scene, recipe) for make in fitting or [_words, _classes, _values]]


def _label_count(scene: Scene) -> int:
    count = first(scene.config, "num_labels")
    return count if isinstance(count, int) else 2


def _area(recipe: Recipe) -> tuple[int, ...]:
    """The height and width of the pictures in a recipe."""
    pictures = next((part for name, part in recipe.items() if name.startswith("pixel_values")), None)
    return pictures.shape[-2:] if isinstance(pictures, Noise) else (32, 32)


def _words(scene: Scene, recipe: Recipe) -> Part:
    for name in ("decoder_input_ids", "input_ids"):
        if isinstance(recipe.get(name), Tokens):
            return Same(name)
    return scene.tokens()


def _transcript(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS, 4), min(16, scene.vocabulary), low=1)


def _classes(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return Integers((ROWS,), _label_count(scene))


def _classes_of_tokens(scene: Scene, recipe: Recipe) -> Part:
    tokens = recipe.get("input_ids")
    return Integers((ROWS, tokens.length if isinstance(tokens, Tokens) else LENGTH), _label_count(scene))


def _classes_of_pixels(scene: Scene, recipe: Recipe) -> Part:
    return Integers((ROWS, *_area(recipe)), _label_count(scene))


def _values(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return Fractions((ROWS, _label_count(scene)))


def _depths(scene: Scene, recipe: Recipe) -> Part:  # noqa: ARG001
    return Fractions((ROWS, *_area(recipe)), 0.1)


def _objects(scene: Scene, recipe: Recipe) -> Part:
    entry: dict[str, Part] = {"class_labels": Integers((OBJECTS,), _label_count(scene)), "boxes": Boxes(OBJECTS)}
    if "Segmentation" in scene.class_name:
        entry["masks"] = Fixed(_masks(_area(recipe)))
    return Each(ROWS, entry)


def _masks(area: tuple[int, ...]) -> torch.Tensor:
    """The left half of the picture, and the right half."""
    left = (torch.arange(area[-1]) < area[-1] // 2).expand(area)
    return torch.stack([left, ~left]).float()


def _segments(scene: Scene, recipe: Recipe) -> Recipe:
    return {
        "mask_labels": Each(ROWS, Fixed(_masks(_area(recipe)))),
        "class_labels": Each(ROWS, Integers((OBJECTS,), _label_count(scene))),
    }


_TASKS: tuple[tuple[str, Callable[[Scene, Recipe], Part]], ...] = (
    ("ObjectDetection|(Detr|Instance).*Segmentation", _objects),
    ("SemanticSegmentation", _classes_of_pixels),
    ("DepthEstimation", _depths),
    ("TokenClassification|FrameClassification", _classes_of_tokens),
    ("(Sequence|Image|Video|Audio)Classification|MultipleChoice|XVector|VisualReasoning", _classes),
    ("ForCTC|ForRNNT|ForTDT", _transcript),
    ("CausalLM|LMHead|ConditionalGeneration|MaskedLM|PreTraining", _words),
)
