"""Makes what `lowtide audit` runs out of a target: a model, a batch and options.

| target | what is audited |
|---|---|
| `MODULE:FACTORY` | what the factory returns; a model without a batch gets one that fits its configuration |
| a model type | the zoo's tiny model |
| a configuration or a name | the model at its size, with its weights if they are here, else with random ones |

A model that does not fit this machine's memory is replaced by the zoo's tiny model of its type, and `note` says so.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import psutil
from torch import Tensor, nn

import lowtide_zoo as zoo
from lowtide._torch import pytree
from lowtide.auditing import CannotAuditError, audit
from lowtide.errors import PlanError
from lowtide.spelling import unknown
from lowtide.targets.batches import no_batch
from lowtide.targets.models import count_parameters, load
from lowtide.targets.target import find_target
from lowtide.units import format_bytes
from lowtide_zoo.find import fitting_batch
from lowtide_zoo.survey import DROPOUT

if TYPE_CHECKING:
    from lowtide.targets.target import Target

BYTES_PER_PARAMETER = 4 * 4
"""An audit holds about four float32 copies: the model and the reference, each with its gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedModel:
    """A model, a batch to audit it with, and what the audit should know about them."""

    name: str
    model: nn.Module
    batch: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keywords of `lowtide.audit` that a factory gave, or that the zoo's models need."""
    tiny_model: zoo.TinyModel | None = None
    """What it was built from, if it comes from the zoo."""
    note: str | None = None
    """Why this is not the model that was named, if it is not."""

    @property
    def is_tiny(self) -> bool:
        """Whether it comes from the zoo."""
        return self.tiny_model is not None

    def to(self, device: str) -> AuditedModel:
        """Move the model and the tensors of the batch to a device."""
        # A tokenizer or a processor returns a mapping, which is a leaf for pytree.
        batch = dict(self.batch) if isinstance(self.batch, Mapping) else self.batch
        batch = pytree.tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
        return dataclasses.replace(self, model=self.model.to(device), batch=batch)


def load_audited(
    name: str, *, seed: int = 0, model_class: str | None = None, variant: str | None = None
) -> AuditedModel:
    """Find the model that `name` stands for, in any form that `lowtide plan` takes, too, and make it ready to audit.

    A model type may come with one of its classes, and with a variant.
    """
    try:
        target = find_target(name)
        if target.kind == "model type":
            return _tiny(target, seed, model_class, variant)
        if model_class is not None or variant is not None:
            raise CannotAuditError(f"--class and --variant go with a model type, and {name} is not one")
        parameters = count_parameters(target)
        if parameters is not None and parameters * BYTES_PER_PARAMETER > available_memory():
            return dataclasses.replace(_tiny(target, seed), note=_too_large(target, parameters))
        model, batch, options = load(target, seed=seed)
    except PlanError as error:  # the words are the same for both verbs
        raise CannotAuditError(str(error)) from error
    _check_options(name, options)
    return AuditedModel(
        name=target.name,
        model=model,
        batch=_batch_for(target, model, seed) if batch is None else batch,
        options=options,
    )


def available_memory() -> int:
    """Return the bytes that a process can use on this machine without swapping."""
    return int(psutil.virtual_memory().available)


def _tiny(target: Target, seed: int, model_class: str | None = None, variant: str | None = None) -> AuditedModel:
    tiny_model = zoo.find(target.fields["model_type"], model_class=model_class, variant=variant)
    return AuditedModel(
        name=target.name,
        model=tiny_model.build(seed),
        batch=tiny_model.batch(seed),
        options={"dropout": DROPOUT},
        tiny_model=tiny_model,
    )


def _too_large(target: Target, parameters: int) -> str:
    needed, there = parameters * BYTES_PER_PARAMETER, available_memory()
    return (
        f"{target.name} is too large to audit here ({parameters / 1e9:.1f}B parameters, about {format_bytes(needed)}; "
        f"{format_bytes(there)} are available): a tiny {target.fields['model_type']} of the same architecture is "
        "audited instead"
    )


def _batch_for(target: Target, model: nn.Module, seed: int) -> dict[str, Any]:
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise CannotAuditError(no_batch(model))
    try:
        return fitting_batch(model, seed)
    except zoo.CannotBuildError as error:
        raise CannotAuditError(
            f"no batch was found that trains {target.name} ({'; '.join(dict.fromkeys(error.reasons))}): give "
            "MODULE:FACTORY, a function that returns (model, batch)"
        ) from error


def _check_options(name: str, options: Any) -> None:
    """Refuse what `lowtide.audit` does not take, before anything is run."""
    if not isinstance(options, dict):
        raise CannotAuditError(f"{name} must return its options as a dict, not as {type(options).__name__}")
    known = [word for word in inspect.signature(audit).parameters if word not in ("model", "batch")]
    for word in options:
        if word not in known:
            raise CannotAuditError(f"{name} returns options: {unknown(word, known, 'lowtide.audit keyword')}")
