"""Builds what is planned: without weights, on the meta device, with adapters if the job has them.

A live module and a factory may bring a batch of their own; for transformers' models it is made from the configuration.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pickle
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn

from lowtide._torch import pytree
from lowtide.compat import installed_version
from lowtide.errors import InvalidValueError, MissingDependencyError, PlanError
from lowtide.targets.job import DTYPES, LORA_TARGETS
from lowtide.targets.target import model_types

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.targets.job import Job
    from lowtide.targets.target import Target

OLDEST_TRANSFORMERS = Version("5")


def build(target: Target, job: Job) -> nn.Module:
    """The module, on the meta device, with adapters if the job has them."""
    return build_with_batch(target, job)[0]


def build_with_batch(target: Target, job: Job) -> tuple[nn.Module, Any]:
    """The module, and its batch if it brought one."""
    batch = None
    if target.kind == "module":
        model, batch = _unpickled(target, job)
    elif target.kind == "factory":
        model, batch = _made_by_factory(target, job)
    else:
        model = _from_transformers(target, job)
    _check_version(model)
    if batch is not None and (job.tokens, job.batch_size, job.images) != (None, 1, None):
        raise InvalidValueError(
            f"{target.name} brings its own batch, and a batch tells its own size: leave tokens, batch_size and images "
            "out"
        )
    model.to("meta")
    return (model if job.lora is None else _with_adapters(model, job)), batch


def _check_version(model: nn.Module) -> None:
    """The step of a transformers 4 model builds masks and experts in ways that the simulator was not judged on."""
    version = installed_version("transformers")
    is_of_transformers = any(cls.__module__.partition(".")[0] == "transformers" for cls in type(model).__mro__)
    if is_of_transformers and version is not None and version < OLDEST_TRANSFORMERS:
        raise PlanError(
            f"planning {type(model).__name__} needs transformers {OLDEST_TRANSFORMERS} or newer, and {version} is "
            "installed: its figures would not be right. apply and audit work with it"
        )


def _unpickled(target: Target, job: Job) -> tuple[nn.Module, Any]:
    if job.lora is not None:
        raise InvalidValueError(
            f"lora={job.lora}: {target.name} is planned as it is. Give it adapters first (peft.get_peft_model), or "
            "plan it by name"
        )
    if job.dtype is not None:
        raise InvalidValueError(
            f"dtype={job.dtype!r}: {target.name} is planned as it is. Convert it first (model.to), or plan it by name"
        )
    try:
        model, batch = pickle.loads(target.content)  # noqa: S301  (we made it)
    except (AttributeError, ImportError) as error:
        raise PlanError(
            f"{target.name} cannot be built in the planning process ({error}): its class must be in a module that can "
            "be imported, not in a script"
        ) from error
    return model, batch


def _made_by_factory(target: Target, job: Job) -> tuple[nn.Module, Any]:
    """A module, or what an audit's factory returns: a module, its batch, and keywords that are the audit's alone."""
    module, _, function = target.content.decode().partition(":")
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"{target.name} cannot be imported: {error}") from error
    with _building(job):
        made = factory()
    model, batch = made[:2] if isinstance(made, tuple) and len(made) > 1 else (made, None)
    if not isinstance(model, nn.Module):
        raise PlanError(f"{target.name} must return a torch.nn.Module, or (model, batch), not {type(made).__name__}")
    if any(
        isinstance(leaf, torch.Tensor) and leaf.is_meta and not leaf.dtype.is_floating_point
        for leaf in pytree.tree_leaves(batch)
    ):
        raise PlanError(
            f"{target.name} is called where new tensors have no values, and its batch has whole numbers, which do "
            'matter: make them with device="cpu"'
        )
    return model, batch


def _from_transformers(target: Target, job: Job) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError("planning by name needs transformers: pip install 'lowtide[hf]'") from error
    fields = json.loads(target.content)
    model_type = fields.pop("model_type")
    if model_type not in model_types():
        raise PlanError(
            f"{target.name}: transformers {transformers.__version__} has no model type {model_type!r}: a newer one may"
        )
    config = transformers.AutoConfig.for_model(model_type, **fields)
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if hasattr(part, "use_cache"):
            part.use_cache = False  # in training there is no use for one
    cls = _class_for(config)
    kernel = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    try:
        with _building(job):
            return cls._from_config(config, attn_implementation=kernel, dtype=job.built_in)  # type: ignore[no-any-return, attr-defined]
    except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"{cls.__name__} cannot be built without weights: {type(error).__name__}: {error}") from error


def _class_for(config: Any) -> type[nn.Module]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for name in (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_FOR_MASKED_LM_MAPPING",
    ):
        mapping = getattr(auto, name, {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]
    raise PlanError(
        f"{config.model_type} has no model that computes a language-modelling loss: plan it as 'MODULE:FACTORY', with "
        "a module that returns its loss"
    )


@contextlib.contextmanager
def _building(job: Job) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(job.built_in)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _targets(model: nn.Module, wanted: tuple[str, ...]) -> list[str] | str:
    """What PEFT is told: each name that was asked for, or those of the usual ones that are there, or all there are.

    A name stands for every layer whose own name ends with it, as in PEFT; one that stands for none is refused.
    """
    layers = [name for name, module in model.named_modules() if _is_linear(module)]
    there = [target for target in wanted if any(f".{name}".endswith(f".{target}") for name in layers)]
    if wanted == LORA_TARGETS:
        return there or "all-linear"
    if missing := [target for target in wanted if target not in there]:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise InvalidValueError(f"no linear layer is called {', '.join(missing)}: there are {known}")
    return there


def _is_linear(module: nn.Module) -> bool:
    """GPT-2's `Conv1D` is one, too."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _with_adapters(model: nn.Module, job: Job) -> nn.Module:
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError("planning LoRA needs peft: pip install 'lowtide[hf]'") from error
    config = peft.LoraConfig(r=job.lora, lora_alpha=job.lora, target_modules=_targets(model, job.lora_targets))
    with _building(job):
        adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # PEFT itself knows the base's type and float32
            parameter.data = parameter.data.to(DTYPES[job.lora_dtype])
    return adapted.to("meta")
