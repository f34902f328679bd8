"""Text with placeholders: as many in every row as a tower makes features of the row's picture or sound.

How many that is depends on merging, pooling and cropping, so the tower itself is asked: it is run once on the layout.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import torch

from lowtide.zoo import audio, vision
from lowtide.zoo.parts import Fixed, Recipe, make_batch
from lowtide.zoo.scene import LENGTH, ROWS, Scene, anywhere

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch import nn

    Layouts = Callable[[Scene, str, Collection[str]], Iterator[Recipe]]

# More placeholders than this make a batch slow.
MOST = 1024
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


_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "im_patch_id")
_AUDIO_TOKENS = ("audio_token_id", "audio_token_index", "audio_placeholder_token_id", "speech_token_id")
MODALITIES = (
    Modality(_IMAGE_TOKENS, "get_image_features", (("pixel_values", vision.pictures),), 1),
    Modality(
        _AUDIO_TOKENS,
        "get_audio_features",
        (("input_features", audio.spectrograms), ("input_values", audio.waveforms)),
        3,
    ),
    Modality(
        ("video_token_id", "video_token_index"), "get_video_features", (("pixel_values_videos", vision.pictures),), 2
    ),
)


@dataclasses.dataclass(frozen=True)
class Planting:
    """One modality's arguments, and the placeholders that they need in every row."""

    recipe: Recipe
    token: int
    count: int
    kind: int


def texts_with_placeholders(scene: Scene) -> Iterator[Recipe]:
    """Text together with all modalities that the model knows, then with each by itself."""
    found = [plantings for plantings in (list(_plantings(scene, m)) for m in MODALITIES) if plantings]
    if not found:
        return
    # A picture and a video go through the same tower; video is for those that know nothing else.
    together = found[:-1] if len(found) > 1 and found[-1][0].kind == 2 else found
    if len(together) > 1:
        yield _text_with(scene, [plantings[0] for plantings in together])
    for plantings in itertools.chain(found):
        for planting in plantings:
            yield _text_with(scene, [planting])


def _plantings(scene: Scene, modality: Modality) -> Iterator[Planting]:
    token = anywhere(scene.config, *modality.token_fields)
    owner = _owner(scene.model, modality.method)
    if token is None or owner is None:
        return
    taken = set(inspect.signature(getattr(owner, modality.method)).parameters) | set(scene.arguments)
    layouts = (layout for name, make in modality.arguments if scene.takes(name) for layout in make(scene, name, taken))
    working = 0
    for layout in layouts:
        count = _count_features(owner, modality.method, layout)
        if count is not None and count <= MOST:
            working += 1
            yield Planting({n: p for n, p in layout.items() if n in scene.arguments}, token, count, modality.kind)
        if working == LAYOUTS:
            return


def _owner(model: nn.Module, method: str) -> nn.Module | None:
    return next((module for module in model.modules() if hasattr(module, method)), None)


def _count_features(owner: nn.Module, method: str, layout: Recipe) -> int | None:
    """How many features a layout makes in each row; None if the model does not take it."""
    function = getattr(owner, method)
    names = inspect.signature(function).parameters
    takes_all = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in names.values())
    batch = {name: value for name, value in make_batch(layout, 0).items() if takes_all or name in names}
    try:
        with torch.no_grad():
            features = function(**batch)
    except Exception:  # noqa: BLE001  a layout is a guess, and models fail on wrong ones in any way they like
        return None
    total = sum(tensor.numel() // tensor.shape[-1] for tensor in _feature_tensors(features))
    return total // ROWS if total and total % ROWS == 0 else None


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


def _text_with(scene: Scene, plantings: list[Planting]) -> Recipe:
    planted: list[tuple[int, int]] = []
    kinds: list[tuple[int, int]] = []
    start = 2
    for planting in plantings:
        places = range(start, start + planting.count)
        planted += [(place, planting.token) for place in places]
        kinds += [(place, planting.kind) for place in places]
        planted += _marks(scene, planting, start - 1, places.stop)
        start = places.stop + 2
    length = start + LENGTH // 2
    recipe: Recipe = {"input_ids": scene.tokens(length, planted)}
    recipe["attention_mask"] = Fixed(torch.ones(ROWS, length, dtype=torch.long))
    for planting in plantings:
        recipe |= {n: p for n, p in planting.recipe.items() if n != "attention_mask"}
    types = torch.zeros(ROWS, length, dtype=torch.long)
    for place, kind in kinds:
        types[:, place] = kind
    for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
        if scene.takes(name):
            recipe[name] = Fixed(types)
    return recipe


def _marks(scene: Scene, planting: Planting, before: int, after: int) -> list[tuple[int, int]]:
    """Tokens around placeholders, from which some models tell where a picture begins."""
    if planting.kind == 3:
        return []
    marks = (
        (before, anywhere(scene.config, "vision_start_token_id", "image_start_token_id", "boi_token_id")),
        (after, anywhere(scene.config, "vision_end_token_id", "image_end_token_id", "eoi_token_id")),
    )
    return [(place, token) for place, token in marks if isinstance(token, int)]
