"""Says what a survey audits: an architecture, one of its classes, or a variant of it.

Transformers' faults differ by class, so a survey of every class takes all public ones. Classes that differ in their
heads alone would be audited for nothing: two are the same if they are built around a base model of one class
(`model.base_model`), and have the same stacks of blocks beside it, by name, class and number. Of such classes the first
in the order of `model_classes` stands for all, which is the most inclusive one. A class without a base model inside is
like no other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from lowtide.auditing.stacks import find_stacks
from lowtide_zoo.classes import configuration_class, import_transformers, model_classes
from lowtide_zoo.shrink import shrink
from lowtide_zoo.size_profile import SIZE_PROFILES
from lowtide_zoo.tiny_model import build_model, quiet
from lowtide_zoo.variants import variants_of

if TYPE_CHECKING:
    from typing import Any

    from torch import nn

Signature = tuple[str, tuple[tuple[str, str, int], ...]]


@dataclasses.dataclass(frozen=True, order=True)
class Subject:
    """A model type, with a class and a variant if they are not the usual ones."""

    model_type: str
    model_class: str = ""
    variant: str = ""

    @property
    def name(self) -> str:
        """The model type, and after it what is unusual."""
        return " ".join(filter(None, (self.model_type, self.model_class, self.variant and f"({self.variant})")))

    @property
    def options(self) -> str:
        """The options of `lowtide audit` that name the class and the variant."""
        options = [f"--class {self.model_class}" if self.model_class else ""]
        return " ".join(filter(None, [*options, f"--variant {self.variant}" if self.variant else ""]))


def subjects_of(model_type: str, *, every_class: bool, variants: bool) -> list[Subject]:
    """Return the subjects of a model type.

    Several classes are all named, because `lowtide audit TYPE` takes the first that can be built: one that cannot would
    go unnoticed.
    """
    found = [Subject(model_type)]
    with quiet():
        classes = different_classes(model_type) if every_class else []
        if len(classes) > 1:
            found = [Subject(model_type, cls.__name__) for cls in classes]
        if variants:
            config = _tiny_configuration(model_type)
            found += [Subject(model_type, variant=name) for name in (variants_of(config) if config is not None else [])]
    return found


def different_classes(model_type: str) -> list[type[nn.Module]]:
    """Return the public classes of a model type, one for each set of those that differ in their heads alone."""
    found: dict[Signature, type[nn.Module]] = {}
    for cls in public_classes(model_type):
        found.setdefault(_signature(cls, model_type), cls)
    return list(found.values())


def public_classes(model_type: str) -> list[type[nn.Module]]:
    """Return the model classes of a type that transformers exports, the most inclusive first."""
    transformers = import_transformers()
    return [cls for cls in model_classes(model_type) if hasattr(transformers, cls.__name__)]


def _signature(cls: type[nn.Module], model_type: str) -> Signature:
    model = _on_meta(cls, model_type)
    if model is None:
        return cls.__name__, ()
    base = getattr(model, "base_model", model)
    inside = {id(module) for module in base.modules()}
    beside = [
        (stack.name, stack.kind, len(stack.blocks))
        for stack in find_stacks(model)
        if id(model.get_submodule(stack.name)) not in inside
    ]
    return type(base).__name__, tuple(sorted(beside))


def _on_meta(cls: type[nn.Module], model_type: str) -> nn.Module | None:
    """Build a tiny model without values; None if it cannot be built that way."""
    config = _tiny_configuration(model_type)
    try:
        with torch.device("meta"):
            return None if config is None else build_model(cls, config, 0)
    except Exception:  # noqa: BLE001  a class that cannot be built like this is like no other
        return None


@functools.lru_cache(maxsize=2)
def _tiny_configuration(model_type: str) -> Any | None:
    for profile in SIZE_PROFILES:
        try:
            return shrink(configuration_class(model_type)(), profile)
        except Exception:  # noqa: BLE001, S112  a profile is a guess; the audit itself says what is wrong with it
            continue
    return None
