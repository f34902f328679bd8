"""Text with placeholders: as many in every row as a tower makes features of the row's picture or sound.

How many that is depends on merging, pooling and cropping, so the tower itself is asked: it is run once on the layout.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch

from lowtide_zoo import audio
from lowtide_zoo import images as vision
from lowtide_zoo.extra_inputs import completed
from lowtide_zoo.model_inputs import LENGTH, ROWS, Fixed, ModelInputs, Recipe, anywhere, in_short, make_batch, ones

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    Layouts = Callable[[ModelInputs, str, Collection[str]], Iterator[Recipe]]

# More placeholders than this make a batch slow.
MOST = 600

# Of each modality, this many layouts are tried in the whole model.
LAYOUTS = 3


@dataclasses.dataclass(frozen=True)
class Modality:
    """Something that placeholders in text stand for."""

    token_fields: tuple[str, ...]
    """Configuration fields with the placeholder's token."""
    method: str
    """The model's method that makes the features."""
    arguments: tuple[tuple[str, Layouts], ...]
    kind: int
    """Its number among the token types of multimodal models."""


IMAGE, VIDEO, AUDIO = 1, 2, 3

_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "im_patch_id")

_AUDIO_TOKENS = ("audio_token_id", "audio_token_index", "audio_placeholder_token_id", "speech_token_id")

MODALITIES = (
    Modality(_IMAGE_TOKENS, "get_image_features", (("pixel_values", vision.pictures),), IMAGE),
    Modality(
        _AUDIO_TOKENS,
        "get_audio_features",
        (("input_features", audio.spectrograms), ("input_values", audio.waveforms)),
        AUDIO,
    ),
    Modality(
        ("video_token_id", "video_token_index"),
        "get_video_features",
        (("pixel_values_videos", vision.pictures),),
        VIDEO,
    ),
)


@dataclasses.dataclass(frozen=True)
class Planting:
    """One modality's arguments, and the placeholders that they need in every row."""

    recipe: Recipe
    token: int
    count: int
    kind: int


def texts_with_placeholders(inputs: ModelInputs) -> Iterator[Recipe]:
    """Text together with all modalities that the model knows, then with each by itself."""
    found = [plantings for plantings in (list(_plantings(inputs, m)) for m in MODALITIES) if plantings]
    if not found:
        return
    # A picture and a video mostly go through the same tower, and then one of them is enough.
    without_video = [plantings for plantings in found if plantings[0].kind != VIDEO]
    if without_video and len(without_video) < len(found):
        yield _text_with(inputs, [plantings[0] for plantings in without_video])
    yield _text_with(inputs, [plantings[0] for plantings in found])
    for plantings in found:
        for planting in plantings:
            yield _text_with(inputs, [planting])


def _plantings(inputs: ModelInputs, modality: Modality) -> Iterator[Planting]:
    token = anywhere(inputs.config, *modality.token_fields)
    owner = next((module for module in inputs.model.modules() if hasattr(module, modality.method)), None)
    if not isinstance(token, int):
        return
    method = getattr(owner, modality.method) if owner is not None else None
    taken = set(inputs.arguments) | set(inspect.signature(method).parameters if method is not None else ())
    layouts = (
        layout for name, make in modality.arguments if inputs.takes(name) for layout in make(inputs, name, taken)
    )
    working = 0
    for pictures_or_sound in layouts:
        layout = completed(inputs, pictures_or_sound, ("high_res_pixel_values",))
        recipe = {name: part for name, part in layout.items() if inputs.takes(name)}
        asking = [functools.partial(_features_by_complaint, inputs, recipe, token)]
        if method is not None:
            asking.insert(0, functools.partial(_features, method, layout))
        count = _first_answer(inputs, asking)
        if count % ROWS == 0 and 0 < count <= MOST:
            working += 1
            yield Planting(recipe, token, count // ROWS, modality.kind)
        if working == LAYOUTS:
            return


def _first_answer(inputs: ModelInputs, asking: Sequence[functools.partial[int]]) -> int:
    """The first number of features that is told; none, if no way of asking works."""
    for ask in asking:
        try:
            told = ask()
        except Exception as error:  # noqa: BLE001  a layout is a guess, and models fail on wrong ones in any way they like
            inputs.notes.append(f"{ask.func.__name__}: {in_short(error)}")
            continue
        if told:
            return told
    return 0


def _features(method: Callable[..., Any], layout: Recipe) -> int:
    """How many features a method makes of a layout."""
    names = inspect.signature(method).parameters
    takes_all = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in names.values())
    batch = {name: value for name, value in make_batch(layout, 0).items() if takes_all or name in names}
    with torch.no_grad():
        features = method(**batch)
    return sum(tensor.numel() // tensor.shape[-1] for tensor in _feature_tensors(features))


_COMPLAINT = re.compile(r"tokens:? \d+,? features:? (\d+)")


def _features_by_complaint(inputs: ModelInputs, recipe: Recipe, token: int) -> int:
    """The same from models without such a method: given too many placeholders, they say how many they expect."""
    batch = make_batch(_text_with(inputs, [Planting(recipe, token, MOST // ROWS, 0)]), 0)
    try:
        with torch.no_grad():
            inputs.model(**{name: value for name, value in batch.items() if inputs.takes(name)})
    except ValueError as error:
        complaint = _COMPLAINT.search(str(error))
        if complaint is None:
            raise
        return int(complaint.group(1))
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


def _text_with(inputs: ModelInputs, plantings: list[Planting]) -> Recipe:
    planted: list[tuple[int, int]] = []
    kinds: list[tuple[int, int]] = []
    start = 2
    for planting in plantings:
        places = range(start, start + planting.count)
        planted += [(place, planting.token) for place in places]
        kinds += [(place, planting.kind) for place in places]
        planted += _marks(inputs, planting, start - 1, places.stop)
        start = places.stop + 2
    length = start + LENGTH // 2
    recipe: Recipe = {"input_ids": inputs.tokens(length, planted)}
    recipe["attention_mask"] = ones(ROWS, length)
    for planting in plantings:
        recipe |= {n: p for n, p in planting.recipe.items() if n != "attention_mask"}
    types = torch.zeros(ROWS, length, dtype=torch.long)
    for place, kind in kinds:
        types[:, place] = kind
    for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
        if inputs.takes(name):
            recipe[name] = Fixed(types)
    return recipe


def _marks(inputs: ModelInputs, planting: Planting, before: int, after: int) -> list[tuple[int, int]]:
    """Tokens around placeholders, from which some models tell where a picture begins."""
    if planting.kind == AUDIO:
        return []
    marks = (
        (before, anywhere(inputs.config, "vision_start_token_id", "image_start_token_id", "boi_token_id")),
        (after, anywhere(inputs.config, "vision_end_token_id", "image_end_token_id", "eoi_token_id")),
    )
    return [(place, token) for place, token in marks if isinstance(token, int)]
