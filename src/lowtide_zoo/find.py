"""Finds a tiny model: the first combination of class, size and batch that trains all of it, or the best there is.

Batches are proposed from the arguments of the model's forward, the richest first, and tried in a smoke step each. The
same search finds a batch for a model that exists already, of any size.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import CannotBuildError
from lowtide.randomness import seeded
from lowtide_zoo.audio import series_layouts, spectrogram_layouts, waveform_layouts
from lowtide_zoo.classes import configuration_class, first_field, missing_package, model_classes, model_types
from lowtide_zoo.extra_inputs import with_extra_inputs, with_labels
from lowtide_zoo.images import image_layouts
from lowtide_zoo.model_inputs import ModelInputs, Recipe, make_batch, summarize_error, text_recipe
from lowtide_zoo.placeholders import texts_with_images, texts_with_placeholders
from lowtide_zoo.shrink import shrink
from lowtide_zoo.size_profile import SIZE_PROFILES, SizeProfile
from lowtide_zoo.special_cases import special_case
from lowtide_zoo.tiny_model import Outcome, TinyModel, build_model, quiet, smoke_step
from lowtide_zoo.variants import SEVERAL_IMAGES, VARIANTS, with_variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_MOST_PARAMETERS = 30_000_000

# How many classes of a model type are tried, and how many batches for each model.
_MOST_CLASSES = 4
_MOST_BATCHES = 60

# Parts of some models never get gradients. After so many batches that train no more than the best one, the search ends.
PATIENCE = 4

_LAYOUTS = (
    ("pixel_values", image_layouts),
    ("pixel_values_videos", image_layouts),
    ("image", image_layouts),
    ("input_features", spectrogram_layouts),
    ("audio_mel", spectrogram_layouts),
    ("spectrogram", spectrogram_layouts),
    ("mel_spectrogram", spectrogram_layouts),
    ("input_values", waveform_layouts),
    ("hidden_states", image_layouts),
)


@dataclasses.dataclass(frozen=True)
class _Found:
    outcome: Outcome
    recipe: Recipe
    config: Any
    cls: type[nn.Module]


def find(model_type: str, *, model_class: str | None = None, variant: str | None = None) -> TinyModel:
    """Find a tiny model of an architecture and a batch that trains it, of the most inclusive class or of a given one.

    A variant (`variants.VARIANTS`) turns a feature on that the default configuration leaves off.

    The result is the same every time, whatever the state of the random generators, and leaves them as they are.
    """
    found = _find(model_type, model_class, variant)
    return TinyModel(model_type, found.cls.__name__, found.config, found.recipe)


def fitting_batch(model: nn.Module, seed: int = 0) -> dict[str, Any]:
    """Make the arguments of one forward for a model of transformers, from its configuration alone."""
    reasons: list[str] = []
    with quiet(), seeded(seed):
        best = _find_batch(ModelInputs(model, model.config), reasons)
    if best is None:
        raise CannotBuildError(type(model).__name__, reasons)
    return make_batch(best[1], seed)


def _find(model_type: str, model_class: str | None, variant: str | None) -> _Found:
    if variant is not None and variant not in VARIANTS:
        raise CannotBuildError(model_type, [f"there is no variant {variant!r}: choose from {', '.join(VARIANTS)}"])
    reasons: list[str] = []
    best: _Found | None = None
    with quiet(), seeded(0):
        for cls in _classes_to_try(model_type, model_class):
            found = _find_for_class(cls, model_type, variant, reasons)
            if found is not None and (best is None or found.outcome.trained_share > best.outcome.trained_share):
                best = found
            if best is not None and best.outcome.trained_share == 1.0:
                break
    if best is None:
        raise CannotBuildError(model_type, reasons)
    return best


def _classes_to_try(model_type: str, model_class: str | None) -> list[type[nn.Module]]:
    if model_type not in model_types():
        raise CannotBuildError(model_type, ["the installed transformers has no such model type"])
    classes = [cls for cls in model_classes(model_type) if model_class in (None, cls.__name__)]
    if classes:
        return classes[:_MOST_CLASSES]
    package = missing_package(model_type)
    if package is not None:
        raise CannotBuildError(model_type, [f"its code needs {package}, which is not installed"])
    if model_class is not None:
        raise CannotBuildError(model_type, [f"it has no class {model_class}"])
    raise CannotBuildError(model_type, ["it has no model class of its own with a forward"])


def _find_for_class(cls: type[nn.Module], model_type: str, variant: str | None, reasons: list[str]) -> _Found | None:
    for profile in SIZE_PROFILES:
        attempts: list[str] = []
        found = _find_for_profile(cls, model_type, variant, profile, attempts)
        reasons += [f"{cls.__name__}, {profile.name}: {attempt}" for attempt in attempts]
        if found is not None:
            return found
    return None


def _find_for_profile(
    cls: type[nn.Module], model_type: str, variant: str | None, profile: SizeProfile, attempts: list[str]
) -> _Found | None:
    try:
        config = _tiny_config(model_type, variant, profile)
        inputs = ModelInputs(_build(cls, config), config)
    except Exception as error:  # noqa: BLE001  a profile is a guess, and what it breaks is recorded
        attempts.append(summarize_error(error))
        return None
    best = _find_batch(inputs, attempts, images=2 if variant == SEVERAL_IMAGES else 1)
    return None if best is None else _Found(*best, config, cls)


def _tiny_config(model_type: str, variant: str | None, profile: SizeProfile) -> Any:
    config = shrink(configuration_class(model_type)(), profile)
    changed = config if variant is None else with_variant(config, variant)
    if changed is None:
        raise ValueError(f"its configuration has nothing to turn on for {variant}")
    return changed


def _build(cls: type[nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in build_model(cls, config, 0).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters are too many")
    return build_model(cls, config, 0)


def _find_batch(inputs: ModelInputs, attempts: list[str], images: int = 1) -> tuple[Outcome, Recipe] | None:
    """Find the first batch that trains all of a model, or the best; add what went wrong to the attempts."""
    best: tuple[Outcome, Recipe] | None = None
    without_progress = 0
    for recipe in itertools.islice(_candidates(inputs, images), _MOST_BATCHES):
        try:
            outcome = smoke_step(inputs.model, make_batch(recipe, 0))
        except Exception as error:  # noqa: BLE001  so is a batch
            attempts.append(f"{', '.join(recipe)}: {summarize_error(error)}")
            continue
        without_progress += 1
        if best is None or outcome > best[0]:
            best, without_progress = (outcome, recipe), 0
        if outcome.trained_share == 1.0 or without_progress == PATIENCE:
            break
    attempts += inputs.notes
    return best


def _candidates(inputs: ModelInputs, images: int) -> Iterator[Recipe]:
    """Yield recipes to try, the richest first, each with labels and then without."""
    for proposed in _proposals(inputs) if images == 1 else texts_with_images(inputs, images):
        taken = {name: part for name, part in proposed.items() if inputs.takes(name)}
        for recipe in with_extra_inputs(inputs, taken):
            yield from with_labels(inputs, recipe)


def _proposals(inputs: ModelInputs) -> Iterator[Recipe]:
    special = special_case(inputs)
    if special is not None:
        yield special
    yield from texts_with_placeholders(inputs)
    if inputs.takes("past_values"):
        yield from series_layouts(inputs)
    for name, layouts in _LAYOUTS:
        if inputs.takes(name) and (name != "hidden_states" or _hidden_states_are_images(inputs)):
            for recipe in layouts(inputs, name, inputs.arguments):
                yield from _with_text(inputs, recipe)
    yield from _texts(inputs)
    yield {}


def _hidden_states_are_images(inputs: ModelInputs) -> bool:
    """Tell whether this is a vision tower, some of which call their images hidden states."""
    return "hidden_states" in inputs.required and first_field(inputs.config, "patch_size") is not None


def _with_text(inputs: ModelInputs, recipe: Recipe) -> Iterator[Recipe]:
    """Add text to an image or audio: for the decoder, for both encoder and decoder, for the encoder, or none."""
    decoder: Recipe = {"decoder_input_ids": inputs.tokens()} if inputs.takes("decoder_input_ids") else {}
    if "input_ids" not in inputs.required and decoder:
        yield recipe | decoder
    if inputs.takes("input_ids"):
        yield recipe | decoder | text_recipe(inputs)
        if decoder:
            yield recipe | text_recipe(inputs)
    if "input_ids" not in inputs.required:
        yield recipe


def _texts(inputs: ModelInputs) -> Iterator[Recipe]:
    if not inputs.takes("input_ids"):
        return
    if inputs.takes("decoder_input_ids"):
        yield text_recipe(inputs) | {"decoder_input_ids": inputs.tokens()}
    yield text_recipe(inputs)
    yield {"input_ids": inputs.tokens()}
