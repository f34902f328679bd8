"""Decides which model a user means: a module, a configuration, or one of the forms in which a model can be named.

| form | example |
|---|---|
| a known name | `Llama-3.1-8B`: the table in `models.json`, in any spelling, with or without `org/` and `-Instruct` |
| a name on the Hugging Face Hub | `org/model`: the local cache is asked first; only the configuration is downloaded |
| a configuration, or the folder it is in | `./model/config.json`, `./model` |
| a model type of transformers | `llama` |
| a function of your own | `MODULE:FACTORY`, `MODULE:FACTORY?layers=4`; modules of the current folder are found |

`find_target` is the only place that reads these forms, so `lowtide plan` and `lowtide audit` take the same words and
refuse the same ones with the same message. What it returns, a `Target`, is still data: it goes to another process and
into a cache key, and `models` builds the module from it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any, Literal

from torch import nn

from lowtide.errors import InvalidValueError, MissingDependencyError, PlanError
from lowtide.spelling import nearest, normalize
from lowtide.targets import FORMS, INSTALL_HF
from lowtide.targets.live_module import pickle_without_weights

Kind = Literal["module", "config", "model type", "factory"]

_VARIANTS = re.compile(r"-(instruct|chat|it|base|pt|thinking|hf)$", re.IGNORECASE)
"""Endings that say how the weights were trained: the model has the same size without them."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Target:
    """A model that was named, and everything that is needed to build it in another process."""

    kind: Kind
    name: str
    content: bytes
    """A pickled module without weights and its batch, a configuration as JSON, or `MODULE:FACTORY`."""
    weights: str | None = dataclasses.field(default=None, compare=False)
    """Where an audit looks for weights: a folder, or a name on the Hub, of which only the local cache is read."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the configuration, of a target that has one."""
        fields: dict[str, Any] = json.loads(self.content)
        return fields


def find_target(model: nn.Module | str | Path | Any, batch: Any = None) -> Target:
    """Return the target that a user means by `model`: a module, a transformers configuration, a path or a name."""
    if isinstance(model, nn.Module):
        return Target("module", type(model).__name__, pickle_without_weights(model, batch))
    if batch is not None:
        raise InvalidValueError(
            "batch= goes with a module: for a configuration or a name, Lowtide makes the batch, or the factory does"
        )
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return _from_config(model.to_dict(), model.model_type)
    if not isinstance(model, str | Path):
        raise InvalidValueError(f"a model is a module, a configuration or a name, not {type(model).__name__}")
    if not str(model):
        raise InvalidValueError(f"the name of the model is empty: give {FORMS}")
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    return _from_file(path) if path.is_file() else _from_name(str(model))


def is_factory(name: str) -> bool:
    """Tell whether a name has the form `MODULE:FACTORY`, with or without `?name=value` arguments behind it."""
    module, _, function = name.partition("?")[0].partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function)) and not Path(name).exists()


def known_models() -> dict[str, dict[str, Any]]:
    """Return the built-in table: each known name with its `config`, and with the `source` that this was taken from."""
    table: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text())
    return table


def model_types() -> list[str]:
    """Return the model types of the installed transformers; none if it is not installed."""
    try:
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
    except ImportError:
        return []
    return sorted(auto.CONFIG_MAPPING_NAMES)


def _from_file(path: Path) -> Target:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidValueError(f"{path} is not JSON ({error}): give a model's config.json") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise InvalidValueError(f"{path} names no model_type: give the config.json of a transformers model")
    return _from_config(config, path.parent.name or config["model_type"], weights=str(path.parent))


def _from_name(name: str) -> Target:
    if is_factory(name):
        return Target("factory", name, name.encode())
    table = {normalize(known): known for known in known_models()}
    short = normalize(_VARIANTS.sub("", name.rpartition("/")[2]))
    if short in table:
        return _from_known(table[short], name)
    types = model_types()
    if name in types:
        return dataclasses.replace(_from_config({"model_type": name}, name), kind="model type")
    if Path(name).exists():
        raise InvalidValueError(f"{name} has no config.json: give {FORMS}")
    if not types:
        raise MissingDependencyError(f"finding {name!r} by name needs transformers: {INSTALL_HF}")
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise InvalidValueError(_unknown(name, types))


def _unknown(name: str, types: list[str]) -> str:
    if "/" in name or name.endswith(".json"):
        return f"there is no {name}: give {FORMS}"
    near = nearest(name, [*known_models(), *types])
    hint = f"did you mean {near}? Otherwise give" if near else "give"
    return f"unknown model {name!r}: {hint} {FORMS}. The known names are {', '.join(known_models())}"


def _from_known(known: str, name: str) -> Target:
    row = known_models()[known]
    source = re.search(_HUB_NAME, row["source"].removeprefix("huggingface.co/"))
    return _from_config(row["config"], known, weights=name if "/" in name else source and source[0])


def _from_hub(name: str) -> Target:
    config = _cached_config(name) or _downloaded_config(name)
    return _from_config(config.to_dict(), name, weights=name)


def _cached_config(name: str) -> Any:
    transformers = importlib.import_module("transformers")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError):  # not cached, or with code to be trusted, which the second look-up reports
        return None


def _downloaded_config(name: str) -> Any:
    transformers = importlib.import_module("transformers")
    if (reason := _why_unreachable(name)) is not None:
        raise PlanError(_not_on_hub(name, reason))
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:  # not there, no access, or with code that would have to be trusted
        raise PlanError(_not_on_hub(name, str(error))) from error


def _why_unreachable(name: str) -> str | None:
    """Ask the Hub once whether it answers: a download would try for half a minute before it gives up."""
    hub, errors = importlib.import_module("huggingface_hub"), importlib.import_module("huggingface_hub.errors")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"))
    except errors.HfHubHTTPError:
        return None  # it did answer, and transformers explains the answer best
    except Exception as error:  # noqa: BLE001  (each version of the Hub's library has another HTTP client)
        return f"{type(error).__name__}: {error}"
    return None


def _not_on_hub(name: str, reason: str) -> str:
    line = (reason.strip().splitlines() or ["no reason is known"])[0].rstrip(".")
    return (
        f"{name!r} is not a file or folder here, and its configuration could not be fetched from the Hub: {line}. Give "
        "the path of its config.json"
    )


def _from_config(config: dict[str, Any], name: str, weights: str | None = None) -> Target:
    return Target("config", name, json.dumps(config, sort_keys=True, default=str).encode(), weights)
