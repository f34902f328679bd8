"""Proposes text with placeholders: in every row, one for each feature that a tower makes of the row's image or audio.

How many features that is depends on merging, pooling and cropping. So nothing is computed here: the tower is run once
on the layout, and the features are counted.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch

from lowtide_zoo.audio import spectrogram_layouts, waveform_layouts
from lowtide_zoo.classes import nested_field
from lowtide_zoo.extra_inputs import completed
from lowtide_zoo.images import image_layouts
from lowtide_zoo.model_inputs import (
    LENGTH,
    ROWS,
    Fixed,
    ModelInputs,
    Noise,
    Part,
    Recipe,
    make_batch,
    ones,
    summarize_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    Layouts = Callable[[ModelInputs, str, Collection[str]], Iterator[Recipe]]

# More placeholders than this make a batch slow.
_MOST_PLACEHOLDERS = 600

# So many layouts of each modality are tried in the whole model.
_MOST_LAYOUTS = 3

# What a model without a method for features says when it is given too many placeholders.
_MISMATCH = re.compile(r"tokens:? \d+,? features:? (\d+)")

# The token types of multimodal models.
_IMAGE, _VIDEO, _AUDIO = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Modality:
    """A kind of data that placeholders in text stand for."""

    token_fields: tuple[str, ...]
    """The configuration fields that may hold the placeholder's token."""
    method: str
    """The model's method that makes the features."""
    arguments: tuple[tuple[str, Layouts], ...]
    """The arguments of a forward that may take it, with their layouts."""
    token_type: int


_MODALITIES = (
    Modality(
        ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "im_patch_id"),
        "get_image_features",
        (("pixel_values", image_layouts),),
        _IMAGE,
    ),
    Modality(
        ("audio_token_id", "audio_token_index", "audio_placeholder_token_id", "speech_token_id"),
        "get_audio_features",
        (("input_features", spectrogram_layouts), ("input_values", waveform_layouts)),
        _AUDIO,
    ),
    Modality(
        ("video_token_id", "video_token_index"),
        "get_video_features",
        (("pixel_values_videos", image_layouts),),
        _VIDEO,
    ),
)


@dataclasses.dataclass(frozen=True)
class ModalityInput:
    """One modality's arguments, and the placeholders that they need in every row."""

    recipe: Recipe
    token: int
    count: int
    token_type: int


def texts_with_placeholders(inputs: ModelInputs) -> Iterator[Recipe]:
    """Yield text with all modalities that the model knows, then with one modality at a time."""
    found = [options for options in (list(_modality_inputs(inputs, m)) for m in _MODALITIES) if options]
    if not found:
        return
    # An image and a video mostly go through the same tower, so that one of them is enough.
    without_video = [options for options in found if options[0].token_type != _VIDEO]
    if without_video and len(without_video) < len(found):
        yield _text_with(inputs, [options[0] for options in without_video])
    yield _text_with(inputs, [options[0] for options in found])
    for options in found:
        for option in options:
            yield _text_with(inputs, [option])


def texts_with_images(inputs: ModelInputs, images: int) -> Iterator[Recipe]:
    """Yield text with several images in every row, for models that take the images of all rows one after another."""
    for option in _modality_inputs(inputs, _MODALITIES[0]):
        several = {name: _repeated(part, images) for name, part in option.recipe.items()}
        again = dataclasses.replace(option, recipe={})
        yield _text_with(inputs, [dataclasses.replace(option, recipe=several), *[again] * (images - 1)])


def _repeated(part: Part, times: int) -> Part:
    """Describe an array that is so many times as long."""
    if isinstance(part, Noise):
        return Noise((times * part.shape[0], *part.shape[1:]))
    if isinstance(part, Fixed) and isinstance(part.value, torch.Tensor):
        return Fixed(torch.cat([part.value] * times))
    return part


def _modality_inputs(inputs: ModelInputs, modality: Modality) -> Iterator[ModalityInput]:
    """Yield the layouts of a modality whose features the model can make and that divide evenly among the rows."""
    token = nested_field(inputs.config, *modality.token_fields)
    owner = next((module for module in inputs.model.modules() if hasattr(module, modality.method)), None)
    if not isinstance(token, int):
        return
    method = getattr(owner, modality.method) if owner is not None else None
    arguments = set(inputs.arguments) | set(inspect.signature(method).parameters if method is not None else ())
    layouts = (
        layout for name, make in modality.arguments if inputs.takes(name) for layout in make(inputs, name, arguments)
    )
    working = 0
    for proposed in layouts:
        layout = completed(inputs, proposed, ("high_res_pixel_values",))
        recipe = {name: part for name, part in layout.items() if inputs.takes(name)}
        counters = [functools.partial(_count_by_error, inputs, recipe, token)]
        if method is not None:
            counters.insert(0, functools.partial(_count_by_method, method, layout))
        count = _count_features(inputs, counters)
        if count % ROWS == 0 and 0 < count <= _MOST_PLACEHOLDERS:
            working += 1
            yield ModalityInput(recipe, token, count // ROWS, modality.token_type)
        if working == _MOST_LAYOUTS:
            return


def _count_features(inputs: ModelInputs, counters: Sequence[functools.partial[int]]) -> int:
    """Return the first count that is found, or zero."""
    for counter in counters:
        try:
            count = counter()
        except Exception as error:  # noqa: BLE001  a layout is a guess, and models fail on wrong ones in any way
            inputs.notes.append(f"{counter.func.__name__}: {summarize_error(error)}")
            continue
        if count:
            return count
    return 0


def _count_by_method(method: Callable[..., Any], layout: Recipe) -> int:
    """Count the features that a method of the model makes of a layout."""
    names = inspect.signature(method).parameters
    takes_all = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in names.values())
    batch = {name: value for name, value in make_batch(layout, 0).items() if takes_all or name in names}
    with torch.no_grad():
        features = method(**batch)
    return sum(tensor.numel() // tensor.shape[-1] for tensor in _feature_tensors(features))


def _count_by_error(inputs: ModelInputs, recipe: Recipe, token: int) -> int:
    """Give the model too many placeholders, and read from its error how many it expects."""
    too_many = ModalityInput(recipe, token, _MOST_PLACEHOLDERS // ROWS, 0)
    batch = make_batch(_text_with(inputs, [too_many]), 0)
    try:
        with torch.no_grad():
            inputs.model(**{name: value for name, value in batch.items() if inputs.takes(name)})
    except ValueError as error:
        mismatch = _MISMATCH.search(str(error))
        if mismatch is None:
            raise
        return int(mismatch.group(1))
    return 0


def _feature_tensors(features: Any) -> list[torch.Tensor]:
    if isinstance(features, torch.Tensor):
        return [features]
    if isinstance(features, list | tuple):
        return [tensor for entry in features for tensor in _feature_tensors(entry)]
    for name in ("pooler_output", "last_hidden_state"):
        found = getattr(features, name, None)
        if found is not None:
            return _feature_tensors(found)
    return []


def _text_with(inputs: ModelInputs, modality_inputs: list[ModalityInput]) -> Recipe:
    """Describe text with the placeholders of each modality in turn, and the arguments that fill them."""
    special: list[tuple[int, int]] = []
    token_types: list[tuple[int, int]] = []
    start = 2
    for given in modality_inputs:
        positions = range(start, start + given.count)
        special += [(position, given.token) for position in positions]
        token_types += [(position, given.token_type) for position in positions]
        special += _boundary_tokens(inputs, given, start - 1, positions.stop)
        start = positions.stop + 2
    length = start + LENGTH // 2
    recipe: Recipe = {"input_ids": inputs.tokens(length, special)}
    recipe["attention_mask"] = ones(ROWS, length)
    for given in modality_inputs:
        recipe |= {name: part for name, part in given.recipe.items() if name != "attention_mask"}
    types = torch.zeros(ROWS, length, dtype=torch.long)
    for position, token_type in token_types:
        types[:, position] = token_type
    for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
        if inputs.takes(name):
            recipe[name] = Fixed(types)
    return recipe


def _boundary_tokens(inputs: ModelInputs, given: ModalityInput, before: int, after: int) -> list[tuple[int, int]]:
    """Return the tokens around placeholders, by which some models find out where an image begins and ends."""
    if given.token_type == _AUDIO:
        return []
    boundaries = (
        (before, nested_field(inputs.config, "vision_start_token_id", "image_start_token_id", "boi_token_id")),
        (after, nested_field(inputs.config, "vision_end_token_id", "image_end_token_id", "eoi_token_id")),
    )
    return [(position, token) for position, token in boundaries if isinstance(token, int)]
