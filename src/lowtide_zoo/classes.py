"""Looks up the classes of an architecture, its configuration and its models, and reads configurations field by field.

The auto classes of transformers know one class for each task, and none of many towers. So model classes are looked up
in the package that defines the configuration: those that name it as their `config_class`, or take it in `__init__`.
They are ordered by how much of the architecture they train.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import typing
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

# The endings of class names, from those that train most of a model to those that train a part of it. A class with an
# earlier ending is tried first; among equals, the one that comes first in its file.
_ENDINGS = (
    "ForConditionalGeneration",
    "ForCTC",
    "ForPreTraining",
    "ForMaskedLM",
    "ForCausalLM",
    "LMHeadModel",
    "ForPrediction",
    "ForUniversalSegmentation",
    "ForInstanceSegmentation",
    "ForObjectDetection",
    "ForSemanticSegmentation",
    "ForImageSegmentation",
    "ForMaskedImageModeling",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)

# These use one tower of several: where there are several, the model without a head is tried before them.
_ONE_TOWER = ("ForImageClassification", "ForVideoClassification", "ForAudioClassification")

# Classes with any other head come next, then those without a head, then parts.
_OTHER_HEAD, _BARE, _PART = len(_ENDINGS), len(_ENDINGS) + 1, len(_ENDINGS) + 2

_PARTS = ("Encoder", "Decoder", "Stack", "Backbone", "EncoderModel", "WithProjection")

# Base classes, and shells around a decoder that keep its weights loadable.
_NOT_MODELS = ("PreTrainedModel", "PretrainedModel", "DecoderWrapper")

# Fields that are handled by name where they matter, or that do not change a model's size.
_NOT_SHRUNK = {
    "transformers_version",
    "architectures",
    "id2label",
    "label2id",
    "dtype",
    "problem_type",
    "rope_parameters",
    "rope_scaling",
    "_out_features",
    "_out_indices",
}


def import_transformers(module: str = "transformers") -> ModuleType:
    """Import transformers, or one of its modules; say how to install it if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"this needs transformers, which cannot be imported here ({error}): pip install 'lowtide[hf]'"
        ) from error


def model_types() -> list[str]:
    """List every model type of the installed transformers, sorted."""
    return sorted(_auto_configurations().CONFIG_MAPPING_NAMES)


def configuration_class(model_type: str) -> type[Any]:
    """Return the configuration class of a model type."""
    found: type[Any] = _auto_configurations().CONFIG_MAPPING[model_type]
    return found


@functools.cache
def model_classes(model_type: str) -> tuple[type[nn.Module], ...]:
    """Return the model classes of a model type that can be tried, the most inclusive first."""
    configuration = configuration_class(model_type)
    own = [cls for module in _modeling_modules(configuration) for cls in _models_in(module, configuration)]
    has_towers = len(getattr(configuration, "sub_configs", {})) > 1
    return tuple(sorted(own or _from_auto_classes(model_type), key=lambda cls: _rank(cls.__name__, has_towers)))


def missing_package(model_type: str) -> str | None:
    """Return the name of a package that the modelling code of a model type fails to import, if there is one."""
    try:
        list(_modeling_modules(configuration_class(model_type), skip_broken=False))
    except ModuleNotFoundError as error:
        return error.name
    # Transformers puts dummies in the place of classes whose packages are missing, and the dummies name the packages.
    return next((cls._backends[0] for cls in _in_auto_classes(model_type) if hasattr(cls, "_backends")), None)


@functools.cache
def is_in_source(configuration: type[Any], text: str) -> bool:
    """Tell whether the modelling code beside a configuration class contains `text`."""
    return any(text in inspect.getsource(module) for module in _modeling_modules(configuration))


def field_names(config: Any) -> list[str]:
    """List the fields that a configuration's constructor takes and that may shrink."""
    return [field.name for field in dataclasses.fields(config) if field.init and field.name not in _NOT_SHRUNK]


def get_field(config: Any, name: str) -> Any:
    """Return the value of a field; some configurations raise on `getattr` if it may differ from layer to layer."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def first_field(config: Any, *names: str) -> Any:
    """Return the first of these fields that is set."""
    return next((get_field(config, name) for name in names if get_field(config, name) is not None), None)


def nested_field(config: Any, *names: str) -> Any:
    """Return the first of these fields that is set, in a configuration or in those nested in it."""
    found = (first_field(part, *names) for part in configurations_in(config))
    return next((value for value in found if value is not None), None)


def configurations_in(config: Any) -> Iterator[Any]:
    """Yield a configuration and those nested in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from configurations_in(value)


def is_configuration(value: Any) -> bool:
    """Tell whether a field's value is a configuration, such as a tower's."""
    return dataclasses.is_dataclass(value) and hasattr(value, "model_type")


def _auto_configurations() -> ModuleType:
    return import_transformers("transformers.models.auto.configuration_auto")


def _modeling_modules(configuration: type[Any], *, skip_broken: bool = True) -> Iterator[ModuleType]:
    package = importlib.import_module(configuration.__module__.rpartition(".")[0])
    for entry in pkgutil.iter_modules(package.__path__):
        if not entry.name.startswith("modeling_"):
            continue
        try:
            yield importlib.import_module(f"{package.__name__}.{entry.name}")
        except ModuleNotFoundError:
            if not skip_broken:
                raise


def _models_in(module: ModuleType, configuration: type[Any]) -> Iterator[type[nn.Module]]:
    base = importlib.import_module("transformers").PreTrainedModel
    for cls in vars(module).values():
        is_own = inspect.isclass(cls) and issubclass(cls, base) and cls.__module__ == module.__name__
        is_model = is_own and not cls.__name__.endswith(_NOT_MODELS) and _has_forward(cls)
        if is_model and _is_configured_by(cls, configuration):
            yield cls


def _has_forward(model: type[Any]) -> bool:
    """Tell whether a model can be called: some only generate, or only encode and decode."""
    return model.forward is not nn.Module.forward


def _is_configured_by(model: type[Any], configuration: type[Any]) -> bool:
    # One class may serve several configurations (a union). The annotation in `__init__` is more reliable than
    # `config_class`, which may be inherited.
    declared = inspect.signature(model.__init__).parameters.get("config")
    if declared is not None and isinstance(declared.annotation, str):
        return declared.annotation.strip("\"'") == configuration.__name__
    annotation = declared.annotation if declared is not None else inspect.Parameter.empty
    if annotation is inspect.Parameter.empty or not _names_configuration(annotation):
        annotation = model.config_class
    return configuration in (typing.get_args(annotation) or (annotation,))


def _names_configuration(annotation: Any) -> bool:
    """Tell whether an annotation names the configuration of one model, or of several; the base class names none."""
    base = importlib.import_module("transformers").PreTrainedConfig
    kinds = typing.get_args(annotation) or (annotation,)
    return all(inspect.isclass(kind) and issubclass(kind, base) and kind is not base for kind in kinds)


def _from_auto_classes(model_type: str) -> list[type[nn.Module]]:
    """Return the classes that the auto classes know, for a type that uses the model of a different type."""
    return [cls for cls in _in_auto_classes(model_type) if not hasattr(cls, "_backends") and _has_forward(cls)]


def _in_auto_classes(model_type: str) -> list[type[Any]]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    transformers = importlib.import_module("transformers")
    names: dict[str, None] = {}
    for mapping in (value for key, value in vars(auto).items() if key.startswith("MODEL_") and key.endswith("_NAMES")):
        found = mapping.get(model_type, ())
        names.update(dict.fromkeys((found,) if isinstance(found, str) else found))
    classes: Iterator[type[Any] | None] = (getattr(transformers, name, None) for name in names)
    return [cls for cls in classes if cls is not None]


def _rank(name: str, has_towers: bool) -> int:
    if name.endswith(_PARTS) or (has_towers and name.endswith(_ONE_TOWER)):
        return _PART
    for rank, ending in enumerate(_ENDINGS):
        if name.endswith(ending):
            return rank
    return _OTHER_HEAD if "For" in name else _BARE if name.endswith("Model") else _PART
