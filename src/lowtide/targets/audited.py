"""What a command line can name: a factory of yours, a model folder, or an architecture of transformers."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import lowtide_zoo as zoo
from lowtide._torch import pytree
from lowtide.auditing import CannotAuditError, audit
from lowtide.randomness import seeded
from lowtide.spelling import nearest, unknown
from lowtide_zoo.classes import configurations_in, import_transformers
from lowtide_zoo.find import fitting_batch
from lowtide_zoo.survey import DROPOUT

_WITH_OPTIONS = 3
"""Of what a factory returns: model, batch, options."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A model and a batch to audit it with."""

    name: str
    model: nn.Module
    batch: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keywords of `lowtide.audit` that a factory gave, or that the zoo has."""
    is_tiny: bool = False
    """Whether the zoo made it."""

    def to(self, device: str) -> Target:
        """Both on a device. What a tokenizer or a processor returns is a mapping, and a leaf to pytree."""
        batch = dict(self.batch) if isinstance(self.batch, Mapping) else self.batch
        batch = pytree.tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
        return dataclasses.replace(self, model=self.model.to(device), batch=batch)


def load_target(name: str, *, seed: int = 0) -> Target:
    """`package.module:factory`, a folder with a config.json, or a transformers model type."""
    if ":" in name:
        return _from_factory(name)
    if (Path(name) / "config.json").is_file():
        return _from_folder(Path(name), seed)
    if Path(name).exists():
        raise CannotAuditError(f"{name} has no config.json: give a model folder, MODULE:FACTORY or a model type")
    if name not in zoo.model_types():
        near = nearest(name, zoo.model_types())
        raise CannotAuditError(
            f"{name!r} is neither MODULE:FACTORY, nor a folder, nor a model type of the installed transformers"
            + (f": did you mean {near}?" if near else "")
        )
    tiny_model = zoo.find(name)
    return Target(name, tiny_model.build(seed), tiny_model.batch(seed), {"dropout": DROPOUT}, is_tiny=True)


def _from_factory(name: str) -> Target:
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # what `python -m` does: modules of the current folder are found
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        made = factory()
    except Exception as error:
        raise CannotAuditError(f"{name} could not be run: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in (2, _WITH_OPTIONS) or not isinstance(made[0], nn.Module):
        raise CannotAuditError(
            f"{name} must return (model, batch) or (model, batch, options), options being keywords of lowtide.audit; "
            f"it returned {type(made).__name__}"
        )
    _check_options(name, made[2] if len(made) == _WITH_OPTIONS else {})
    return Target(name, *made)


def _check_options(name: str, options: Any) -> None:
    """Before anything is run: what `lowtide.audit` takes."""
    if not isinstance(options, dict):
        raise CannotAuditError(f"{name} must return its options as a dict, not as {type(options).__name__}")
    known = [word for word in inspect.signature(audit).parameters if word not in ("model", "batch")]
    for word in options:
        if word not in known:
            raise CannotAuditError(f"{name} returns options: {unknown(word, known, 'lowtide.audit keyword')}")


def _from_folder(folder: Path, seed: int) -> Target:
    """The model with its weights if they are there, else with random ones."""
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        cls = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
        with seeded(seed):  # of all weights, or of those that are not in the folder
            model = cls.from_pretrained(folder) if has_weights else _from_config(cls, config)
    except (OSError, ValueError, AttributeError, ImportError, RuntimeError) as error:
        raise CannotAuditError(f"{folder} could not be loaded: {type(error).__name__}: {error}") from error
    for config in configurations_in(model.config):
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return Target(str(folder), model, fitting_batch(model, seed))


def _from_config(cls: Any, config: Any) -> nn.Module:
    model: nn.Module = cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
    return model
