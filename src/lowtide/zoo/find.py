"""Finds a specimen: the first combination of class, plan and batch that trains all of a model, or the best there is."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import LowtideError
from lowtide.zoo.batches import candidates
from lowtide.zoo.classes import configuration_class, missing_package, model_classes, model_types
from lowtide.zoo.parts import Recipe, make_batch
from lowtide.zoo.rules import PLANS, Plan
from lowtide.zoo.scene import Scene, in_short
from lowtide.zoo.shrink import shrink
from lowtide.zoo.specimen import Specimen, build_model
from lowtide.zoo.surroundings import own_randomness, quiet
from lowtide.zoo.trial import Outcome, try_batch

if TYPE_CHECKING:
    from torch import nn

MOST_PARAMETERS = 30_000_000
# Of a model type's classes, so many are tried; of a model's batches, so many.
MOST_CLASSES = 4
MOST_BATCHES = 60
# Parts of some models never have gradients. After so many batches that train no more than others did, it is enough.
PATIENCE = 4

# Of the reasons for a failure, so many from the beginning and from the end are shown.
_SHOWN = 4


class CannotBuildError(LowtideError):
    """No tiny model of an architecture could be made to train; the message says what was tried."""

    def __init__(self, model_type: str, reasons: list[str]) -> None:
        self.model_type = model_type
        self.reasons = tuple(reasons)
        different = list(dict.fromkeys(reasons))
        left_out = len(different) - 2 * _SHOWN
        if left_out > 0:
            different = [*different[:_SHOWN], f"... {left_out} more ...", *different[-_SHOWN:]]
        super().__init__("\n  ".join([f"No specimen of {model_type!r} could be built:", *different]))


@dataclasses.dataclass(frozen=True)
class _Found:
    outcome: Outcome
    recipe: Recipe
    config: Any
    cls: type[nn.Module]


def find(model_type: str, *, model_class: str | None = None) -> Specimen:
    """A tiny model of an architecture with a batch that trains it, of its most inclusive class or of a given one.

    The result is the same every time, whatever the state of the random generators, and leaves them as they are.
    """
    found = _find(model_type, model_class)
    return Specimen(model_type, found.cls.__name__, found.config, found.recipe)


def _find(model_type: str, model_class: str | None) -> _Found:
    reasons: list[str] = []
    best: _Found | None = None
    with quiet(), own_randomness(0):
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
    for plan in PLANS:
        attempts: list[str] = []
        found = _find_for_plan(cls, model_type, plan, attempts)
        reasons += [f"{cls.__name__}, {plan.name}: {attempt}" for attempt in attempts]
        if found is not None:
            return found
    return None


def _find_for_plan(cls: type[nn.Module], model_type: str, plan: Plan, attempts: list[str]) -> _Found | None:
    try:
        config = shrink(configuration_class(model_type)(), plan)
        scene = Scene(_build(cls, config), config)
    except Exception as error:  # noqa: BLE001  a plan is a guess, and what it breaks is recorded
        attempts.append(in_short(error))
        return None
    best = find_batch(scene, attempts)
    return None if best is None else _Found(*best, config, cls)


def find_batch(scene: Scene, attempts: list[str]) -> tuple[Outcome, Recipe] | None:
    """The first batch that trains all of a model, or the best; what went wrong is added to the attempts."""
    best: tuple[Outcome, Recipe] | None = None
    in_vain = 0
    for recipe in itertools.islice(candidates(scene), MOST_BATCHES):
        try:
            outcome = try_batch(scene.model, make_batch(recipe, 0))
        except Exception as error:  # noqa: BLE001  so is a batch
            attempts.append(f"{', '.join(recipe)}: {in_short(error)}")
            continue
        in_vain += 1
        if best is None or outcome > best[0]:
            best, in_vain = (outcome, recipe), 0
        if outcome.trained_share == 1.0 or in_vain == PATIENCE:
            break
    attempts += scene.notes
    return best


def _build(cls: type[nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in build_model(cls, config, 0).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters are too many")
    return build_model(cls, config, 0)
