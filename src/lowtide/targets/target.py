"""What can be planned: a module, a configuration, or a name that stands for one.

A `Target` is what the user named, in a form that goes to another process and into a cache key. `models.build` makes the
module there. A name of the Hugging Face Hub (`org/model`) is looked up where transformers looks: in the local cache,
else on the Hub, and only its configuration is fetched.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide._torch import pytree
from lowtide.errors import InvalidValueError, MissingDependencyError, PlanError
from lowtide.spelling import nearest, normalize

MOST_INTEGERS = 1 << 22
MOST_NUMBERS = 1 << 16
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_VARIANTS = re.compile(r"-(instruct|chat|it|base|pt|thinking|hf)$", re.IGNORECASE)
"""Ends of names that say how the weights were trained: the model is as large without."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Target:
    """A model to plan: its kind, and what is needed to build it elsewhere."""

    kind: str
    """`module`, `config` or `factory`."""
    name: str
    content: bytes
    """A pickled module without weights and its batch, a configuration as JSON, or `MODULE:FACTORY`."""


def has_kept_size(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small enough to carry its value with it: sizes and positions decide what a model does."""
    return tensor.numel() <= (MOST_INTEGERS if tensor.dtype in INTEGERS else MOST_NUMBERS)


def known_models() -> dict[str, dict[str, Any]]:
    """The built-in table: name -> `config` and `source`."""
    table: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text())
    return table


def find_target(model: nn.Module | str | Path | Any, batch: Any = None) -> Target:
    """What a user means by one of the things that `lowtide.plan` takes."""
    if isinstance(model, nn.Module):
        return Target("module", type(model).__name__, _without_weights(model, batch))
    if batch is not None:
        raise InvalidValueError("batch= goes with a module: of a configuration or a name, batches are made here")
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
    table = {normalize(known): (known, row) for known, row in known_models().items()}
    short = normalize(_VARIANTS.sub("", name.rpartition("/")[2]))
    if short in table:
        known, row = table[short]
        return _from_config(row["config"], known)
    types = model_types()
    if name in types:
        return _from_config({"model_type": name}, name)
    if not types:
        raise MissingDependencyError(f"planning {name!r} by name needs transformers: pip install 'lowtide[hf]'")
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    if "/" in name or name.endswith(".json"):
        raise InvalidValueError(f"there is no {name}: give the path of a model's config.json, or of its folder")
    near = nearest(name, [*known_models(), *types])
    hint = f"did you mean {near}? Or " if near else ""
    raise InvalidValueError(
        f"{name!r} is no model that Lowtide knows: {hint}give a name of the Hub (org/model), a model type of "
        f"transformers, a config.json, its folder, MODULE:FACTORY, or one of {', '.join(known_models())}"
    )


def _from_hub(name: str) -> Target:
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:  # not there, no network, or code of its own that would have to be trusted
        reason = str(error).strip().splitlines()[0]
        raise PlanError(
            f"{name!r} is no file here, and its configuration cannot be had from the Hub: {reason}. Give the path of "
            "its config.json"
        ) from error
    return _from_config(config.to_dict(), name)


def _from_config(config: dict[str, Any], name: str) -> Target:
    return Target("config", name, json.dumps(config, sort_keys=True, default=str).encode())


def model_types() -> list[str]:
    """Those of the installed transformers; none if it is not there."""
    try:
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
    except ImportError:
        return []
    return sorted(auto.CONFIG_MAPPING_NAMES)


class _WithoutWeights(pickle.Pickler):
    """Tensors are sent as shapes; only integers, and small tensors of other kinds, keep their values."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if type(thing) not in (torch.Tensor, nn.Parameter):
            raise PlanError(
                f"the model has a weight of kind {type(thing).__name__}, which cannot be planned from a live model: "
                "plan it by name, with engine= for sharded and base='4bit' for quantized weights"
            )
        is_parameter = isinstance(thing, nn.Parameter)
        if not is_parameter and thing.device.type == "cpu" and has_kept_size(thing):
            return NotImplemented
        return _meta_tensor, (tuple(thing.shape), thing.stride(), thing.dtype, is_parameter, thing.requires_grad)


def _meta_tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor


def _without_weights(model: nn.Module, batch: Any) -> bytes:
    buffer = io.BytesIO()
    batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu() if has_kept_size(tensor) else tensor, batch)
    try:
        _WithoutWeights(buffer).dump((model, batch))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"{type(model).__name__} cannot be sent to the planning process ({error}): plan it as 'MODULE:FACTORY', a "
            "function in an importable module that builds it"
        ) from error
    return buffer.getvalue()
