"""What can be planned, and how it is built: without weights, from a configuration or a function, on the meta device.

A `Target` is what the user named, in a form that goes to another process and into a cache key. `build` makes the module
there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import io
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn

from lowtide.compat import installed_version
from lowtide.errors import InvalidValueError, MissingDependencyError, PlanError
from lowtide.planning.blank.values import MOST_NUMBERS
from lowtide.planning.job import DTYPES, LORA_TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.planning.job import Job

OLDEST_TRANSFORMERS = Version("5")


@dataclasses.dataclass(frozen=True)
class Target:
    """A model to plan: its kind, and what is needed to build it elsewhere."""

    kind: str
    """`module`, `config` or `factory`."""
    name: str
    content: bytes
    """A pickled module without weights, a configuration as JSON, or `MODULE:FACTORY`."""


def known_models() -> dict[str, dict[str, Any]]:
    """The built-in table: name -> `config` and `source`."""
    table: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text())
    return table


def find_target(model: nn.Module | str | Path | Any) -> Target:
    """What a user means: a module, a configuration, a folder, a name, a model type, or `MODULE:FACTORY`."""
    if isinstance(model, nn.Module):
        return Target("module", type(model).__name__, _without_weights(model))
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return _from_config(model.to_dict(), model.model_type)
    if not isinstance(model, str | Path):
        raise InvalidValueError(f"a model is a module, a configuration or a name, not {type(model).__name__}")
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _from_file(path)
    return _from_name(str(model))


def _from_file(path: Path) -> Target:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidValueError(f"{path} is no JSON ({error}): give a model's config.json") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise InvalidValueError(f"{path} names no model_type: give the config.json of a transformers model")
    return _from_config(config, path.parent.name or config["model_type"])


def _from_name(name: str) -> Target:
    module, colon, function = name.partition(":")
    if colon and module and function:
        return Target("factory", name, name.encode())
    table = {_plain(known): (known, row) for known, row in known_models().items()}
    short = _plain(name.rpartition("/")[2])
    if short in table:
        known, row = table[short]
        return _from_config(row["config"], known)
    types = _model_types()
    if name in types:
        return _from_config({"model_type": name}, name)
    if not types:
        raise MissingDependencyError(f"planning {name!r} by name needs transformers: pip install 'lowtide[hf]'")
    near = difflib.get_close_matches(short, [*table, *types], n=1)
    hint = f"did you mean {table[near[0]][0] if near[0] in table else near[0]!r}? Or " if near else ""
    raise InvalidValueError(
        f"{name!r} is no model that Lowtide knows: {hint}give a model type of transformers, a config.json, its folder, "
        f"MODULE:FACTORY, or one of {', '.join(known_models())}"
    )


def _from_config(config: dict[str, Any], name: str) -> Target:
    return Target("config", name, json.dumps(config, sort_keys=True, default=str).encode())


def _model_types() -> list[str]:
    try:
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
    except ImportError:
        return []
    return sorted(auto.CONFIG_MAPPING_NAMES)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


class _WithoutWeights(pickle.Pickler):
    """Tensors are sent as shapes; only small buffers keep their values."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if type(thing) not in (torch.Tensor, nn.Parameter):
            raise PlanError(
                f"the model has a weight of kind {type(thing).__name__}, which cannot be planned from a live model: "
                "plan it by name, with engine= for sharded and base='4bit' for quantized weights"
            )
        is_parameter = isinstance(thing, nn.Parameter)
        if not is_parameter and thing.device.type == "cpu" and thing.numel() <= MOST_NUMBERS:
            return NotImplemented
        return _blank, (tuple(thing.shape), thing.stride(), thing.dtype, is_parameter, thing.requires_grad)


def _blank(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor


def _without_weights(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    try:
        _WithoutWeights(buffer).dump(model)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"{type(model).__name__} cannot be sent to the planning process ({error}): plan it as 'MODULE:FACTORY', a "
            "function in an importable module that builds it"
        ) from error
    return buffer.getvalue()


def build(target: Target, job: Job) -> nn.Module:
    """The module, on the meta device, with adapters if the job has them."""
    if target.kind == "module":
        if job.lora is not None:
            raise InvalidValueError(
                f"lora={job.lora}: {target.name} is planned as it is. Give it adapters first (peft.get_peft_model), or "
                "plan it by name"
            )
        model = _unpickled(target)
    elif target.kind == "factory":
        model = _made_by_factory(target, job)
    else:
        model = _from_transformers(target, job)
    _check_version(model)
    model.to("meta")
    return model if job.lora is None else _with_adapters(model, job)


def _check_version(model: nn.Module) -> None:
    """The step of a transformers 4 model builds masks and experts in ways that the simulator was not judged on."""
    version = installed_version("transformers")
    is_of_transformers = any(cls.__module__.partition(".")[0] == "transformers" for cls in type(model).__mro__)
    if is_of_transformers and version is not None and version < OLDEST_TRANSFORMERS:
        raise PlanError(
            f"planning {type(model).__name__} needs transformers {OLDEST_TRANSFORMERS} or newer, and {version} is "
            "installed: its figures would not be right. apply and audit work with it"
        )


def _unpickled(target: Target) -> nn.Module:
    try:
        model: nn.Module = pickle.loads(target.content)  # noqa: S301  (we made it)
    except (AttributeError, ImportError) as error:
        raise PlanError(
            f"{target.name} cannot be built in the planning process ({error}): its class must be in a module that can "
            "be imported, not in a script"
        ) from error
    return model


def _made_by_factory(target: Target, job: Job) -> nn.Module:
    module, _, function = target.content.decode().partition(":")
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"{target.name} cannot be imported: {error}") from error
    with _building(job):
        model = factory()
    if not isinstance(model, nn.Module):
        raise PlanError(f"{target.name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_transformers(target: Target, job: Job) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError("planning by name needs transformers: pip install 'lowtide[hf]'") from error
    fields = json.loads(target.content)
    model_type = fields.pop("model_type")
    if model_type not in _model_types():
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
            return cls._from_config(config, attn_implementation=kernel, dtype=DTYPES[job.dtype])  # type: ignore[no-any-return, attr-defined]
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
    torch.set_default_dtype(DTYPES[job.dtype])
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _with_adapters(model: nn.Module, job: Job) -> nn.Module:
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise MissingDependencyError("planning LoRA needs peft: pip install 'lowtide[hf]'") from error
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets: Any = [target for target in job.lora_targets if target in names]
    if not targets and job.lora_targets != LORA_TARGETS:
        raise InvalidValueError(
            f"no linear layer is called {', '.join(job.lora_targets)}: there are {', '.join(names)}"
        )
    targets = targets or "all-linear"
    config = peft.LoraConfig(r=job.lora, lora_alpha=job.lora, target_modules=targets)
    with _building(job):
        adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=job.lora_dtype == "fp32")
    return adapted.to("meta")
