"""Proposes batches for a model, from the arguments of its forward; the richest come first.

One forward and backward of a model on a batch: does it work, and how much of the model does it train?

Finds a tiny model: the first combination of class, size profile and batch that trains all of it, or the best there
is.

A batch for a model that is there already, of any size.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.errors import CannotBuildError
from lowtide.randomness import seeded
from lowtide_zoo.audio import series, spectrograms, waveforms
from lowtide_zoo.classes import configuration_class, missing_package, model_classes, model_types
from lowtide_zoo.extra_inputs import with_extra_inputs, with_labels
from lowtide_zoo.images import pictures
from lowtide_zoo.model_inputs import ModelInputs, Recipe, first, in_short, make_batch, text
from lowtide_zoo.placeholders import texts_with_placeholders
from lowtide_zoo.shrink import shrink
from lowtide_zoo.size_profile import SIZE_PROFILES, SizeProfile
from lowtide_zoo.special_cases import special_case
from lowtide_zoo.tiny_model import TinyModel, build_model, quiet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide_zoo.model_inputs import Recipe

_MODALITIES = (
    ("pixel_values", pictures),
    ("pixel_values_videos", pictures),
    ("image", pictures),
    ("input_features", spectrograms),
    ("audio_mel", spectrograms),
    ("spectrogram", spectrograms),
    ("mel_spectrogram", spectrograms),
    ("input_values", waveforms),
    ("hidden_states", pictures),
)


def candidates(inputs: ModelInputs) -> Iterator[Recipe]:
    """Recipes to try, the richest first, each first with labels and then without."""
    for proposed in _inputs(inputs):
        taken = {name: part for name, part in proposed.items() if inputs.takes(name)}
        for recipe in with_extra_inputs(inputs, taken):
            yield from with_labels(inputs, recipe)


def _inputs(inputs: ModelInputs) -> Iterator[Recipe]:
    yield from special_case(inputs)
    yield from texts_with_placeholders(inputs)
    if inputs.takes("past_values"):
        yield from series(inputs)
    for name, layouts in _MODALITIES:
        if inputs.takes(name) and (name != "hidden_states" or _looks_at_pictures(inputs)):
            for recipe in layouts(inputs, name, inputs.arguments):
                yield from _with_text(inputs, recipe)
    yield from _texts(inputs)
    yield {}


def _looks_at_pictures(inputs: ModelInputs) -> bool:
    """Whether hidden states are what a vision tower calls its pictures."""
    return "hidden_states" in inputs.required and first(inputs.config, "patch_size") is not None


def _with_text(inputs: ModelInputs, recipe: Recipe) -> Iterator[Recipe]:
    """Beside a picture or sound: text for the encoder, for the decoder, for both, or none."""
    decoder: Recipe = {"decoder_input_ids": inputs.tokens()} if inputs.takes("decoder_input_ids") else {}
    if "input_ids" not in inputs.required and decoder:
        yield recipe | decoder
    if inputs.takes("input_ids"):
        yield recipe | decoder | text(inputs)
        if decoder:
            yield recipe | text(inputs)
    if "input_ids" not in inputs.required:
        yield recipe


def _texts(inputs: ModelInputs) -> Iterator[Recipe]:
    if not inputs.takes("input_ids"):
        return
    if inputs.takes("decoder_input_ids"):
        yield text(inputs) | {"decoder_input_ids": inputs.tokens()}
    yield text(inputs)
    yield {"input_ids": inputs.tokens()}


class _UselessError(Exception):
    """The batch runs, and yet trains nothing, or not with numbers."""


@dataclasses.dataclass(frozen=True, order=True)
class Outcome:
    """What a batch does for a model. The larger, the better."""

    trained_share: float
    """Stacks of layers with gradients among all of them."""
    has_loss: bool
    """Whether the model made a loss of its own."""


def smoke_step(model: nn.Module, batch: dict[str, Any]) -> Outcome:
    """Runs the model forward and backward. Whatever goes wrong is raised."""
    model.zero_grad(set_to_none=True)
    with quiet(), seeded(0):
        output = model(**batch)
        own = _own_loss(output)
        loss = own if own is not None else _loss_of_tensors(output)
        torch.autograd.backward(loss)
    _check_gradients(model, loss)
    stacks = list(_stacks(model))
    trained = sum(any(_is_trained(p) for p in stack.parameters()) for stack in stacks)
    model.zero_grad(set_to_none=True)
    return Outcome(trained / len(stacks) if stacks else 1.0, own is not None)


def _own_loss(output: Any) -> torch.Tensor | None:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    return None


def _loss_of_tensors(output: Any) -> torch.Tensor:
    """Weighs all finite numbers at random: a plain mean would cancel in normalised outputs."""
    generator = torch.Generator().manual_seed(0)
    outputs = (tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.is_floating_point())
    finite = [numbers for numbers in (tensor[torch.isfinite(tensor)] for tensor in outputs) if numbers.numel()]
    terms = [(numbers * torch.randn(numbers.shape, generator=generator)).mean() for numbers in finite]
    if not terms:
        raise _UselessError("no output depends on a parameter")
    return torch.stack(terms).sum()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        yield from _tensors(vars(output))


def _check_gradients(model: nn.Module, loss: torch.Tensor) -> None:
    if not torch.isfinite(loss):
        raise _UselessError(f"the loss is {loss.item()}")
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise _UselessError("a gradient is not finite")
    if not any(bool(gradient.any()) for gradient in gradients):
        raise _UselessError("all gradients are zero")


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Lists of layers that hold trainable parameters."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(p.requires_grad for p in module.parameters()):
            yield module


MOST_PARAMETERS = 30_000_000

# Of a model type's classes, so many are tried; of a model's batches, so many.
MOST_CLASSES = 4

MOST_BATCHES = 60

# Parts of some models never have gradients. After so many batches that train no more than others did, it is enough.
PATIENCE = 4


@dataclasses.dataclass(frozen=True)
class _Found:
    outcome: Outcome
    recipe: Recipe
    config: Any
    cls: type[nn.Module]


def find(model_type: str, *, model_class: str | None = None) -> TinyModel:
    """A tiny model of an architecture with a batch that trains it, of its most inclusive class or of a given one.

    The result is the same every time, whatever the state of the random generators, and leaves them as they are.
    """
    found = _find(model_type, model_class)
    return TinyModel(model_type, found.cls.__name__, found.config, found.recipe)


def _find(model_type: str, model_class: str | None) -> _Found:
    reasons: list[str] = []
    best: _Found | None = None
    with quiet(), seeded(0):
        for cls in _classes(model_type, model_class):
            found = _find_for_class(cls, model_type, reasons)
            if found is not None and (best is None or found.outcome.trained_share > best.outcome.trained_share):
                best = found
            if best is not None and best.outcome.trained_share == 1.0:
                break
    if best is None:
        raise CannotBuildError(model_type, reasons)
    return best


def _classes(model_type: str, model_class: str | None) -> list[type[nn.Module]]:
    if model_type not in model_types():
        raise CannotBuildError(model_type, ["the installed transformers has no such model type"])
    classes = [cls for cls in model_classes(model_type) if model_class in (None, cls.__name__)]
    if classes:
        return classes[:MOST_CLASSES]
    package = missing_package(model_type)
    if package is not None:
        raise CannotBuildError(model_type, [f"its code needs {package}, which is not installed"])
    asked = (
        "it has no model class of its own with a forward" if model_class is None else f"it has no class {model_class}"
    )
    raise CannotBuildError(model_type, [asked])


def _find_for_class(cls: type[nn.Module], model_type: str, reasons: list[str]) -> _Found | None:
    for plan in SIZE_PROFILES:
        attempts: list[str] = []
        found = _find_for_plan(cls, model_type, plan, attempts)
        reasons += [f"{cls.__name__}, {plan.name}: {attempt}" for attempt in attempts]
        if found is not None:
            return found
    return None


def _find_for_plan(cls: type[nn.Module], model_type: str, plan: SizeProfile, attempts: list[str]) -> _Found | None:
    try:
        config = shrink(configuration_class(model_type)(), plan)
        inputs = ModelInputs(_build(cls, config), config)
    except Exception as error:  # noqa: BLE001  a plan is a guess, and what it breaks is recorded
        attempts.append(in_short(error))
        return None
    best = find_batch(inputs, attempts)
    return None if best is None else _Found(*best, config, cls)


def find_batch(inputs: ModelInputs, attempts: list[str]) -> tuple[Outcome, Recipe] | None:
    """The first batch that trains all of a model, or the best; what went wrong is added to the attempts."""
    best: tuple[Outcome, Recipe] | None = None
    in_vain = 0
    for recipe in itertools.islice(candidates(inputs), MOST_BATCHES):
        try:
            outcome = smoke_step(inputs.model, make_batch(recipe, 0))
        except Exception as error:  # noqa: BLE001  so is a batch
            attempts.append(f"{', '.join(recipe)}: {in_short(error)}")
            continue
        in_vain += 1
        if best is None or outcome > best[0]:
            best, in_vain = (outcome, recipe), 0
        if outcome.trained_share == 1.0 or in_vain == PATIENCE:
            break
    attempts += inputs.notes
    return best


def _build(cls: type[nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in build_model(cls, config, 0).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters are too many")
    return build_model(cls, config, 0)


def fitting_batch(model: nn.Module, seed: int = 0) -> dict[str, Any]:
    """The arguments of one forward, made of the model's configuration alone."""
    reasons: list[str] = []
    with quiet(), seeded(seed):
        best = find_batch(ModelInputs(model, model.config), reasons)
    if best is None:
        raise CannotBuildError(type(model).__name__, reasons)
    return make_batch(best[1], seed)
