"""Reading the fields of a configuration.

Which model classes belong to a model type, the most inclusive first.

The auto classes of transformers know one class for each task, and nothing of many towers. So the classes are looked up
in the package that defines the configuration: those that name it as their `config_class`, or take it in `__init__`.
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

# Handled by name where they matter, or of no consequence for a model's size.
_LEFT_ALONE = {
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


def field_names(config: Any) -> list[str]:
    """The fields that a configuration's constructor takes and that may shrink."""
    return [field.name for field in dataclasses.fields(config) if field.init and field.name not in _LEFT_ALONE]


def read(config: Any, name: str) -> Any:
    """The value of a field; some configurations refuse to tell it when it may differ from layer to layer."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def is_configuration(value: Any) -> bool:
    """Whether a value is a configuration, such as that of a tower."""
    return dataclasses.is_dataclass(value) and hasattr(value, "model_type")


# How a class name ends, from what trains most of a model to what trains a part of it. A class with the earlier ending
# is tried first; among equals, the one that comes first in its file.
ENDINGS = (
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

# These use one tower of several, so that a model of several without a head of its own comes before them.
_OF_ONE_TOWER = ("ForImageClassification", "ForVideoClassification", "ForAudioClassification")

# Classes with any other head come next, then those without a head, then parts.
_OTHER_HEAD, _BARE, _PART = len(ENDINGS), len(ENDINGS) + 1, len(ENDINGS) + 2

_PARTS = ("Encoder", "Decoder", "Stack", "Backbone", "EncoderModel", "WithProjection")

# No models of their own: base classes, and shells around a decoder that keep its weights loadable.
_NOT_MODELS = ("PreTrainedModel", "PretrainedModel", "DecoderWrapper")


def import_transformers(module: str = "transformers") -> ModuleType:
    """Transformers, or a module of it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"this needs transformers, which cannot be imported here ({error}): pip install 'lowtide[hf]'"
        ) from error


def model_types() -> list[str]:
    """Every model type of the installed transformers, sorted."""
    return sorted(_configurations().CONFIG_MAPPING_NAMES)


def configuration_class(model_type: str) -> type[Any]:
    """The configuration class of a model type."""
    found: type[Any] = _configurations().CONFIG_MAPPING[model_type]
    return found


@functools.cache
def model_classes(model_type: str) -> tuple[type[nn.Module], ...]:
    """The model classes of a model type that can be tried, the most inclusive first."""
    configuration = configuration_class(model_type)
    own = [cls for module in _modeling_modules(configuration) for cls in _models_in(module, configuration)]
    has_towers = len(getattr(configuration, "sub_configs", {})) > 1
    return tuple(sorted(own or _from_auto_classes(model_type), key=lambda cls: _rank(cls.__name__, has_towers)))


@functools.cache
def is_in_source(configuration: type[Any], text: str) -> bool:
    """Whether the modelling code beside a configuration contains a text."""
    return any(text in inspect.getsource(module) for module in _modeling_modules(configuration))


def missing_package(model_type: str) -> str | None:
    """The name of a package that the modelling code of a model type fails to import."""
    try:
        list(_modeling_modules(configuration_class(model_type), skip_broken=False))
    except ModuleNotFoundError as error:
        return error.name
    # Transformers has dummies in place of classes whose packages are missing; they know which.
    return next((cls._backends[0] for cls in _in_auto_classes(model_type) if hasattr(cls, "_backends")), None)


def _configurations() -> ModuleType:
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
        if is_own and not cls.__name__.endswith(_NOT_MODELS) and _has_forward(cls) and _takes(cls, configuration):
            yield cls


def _has_forward(model: type[Any]) -> bool:
    """Some models only generate, or only encode and decode."""
    return model.forward is not nn.Module.forward


def _takes(model: type[Any], configuration: type[Any]) -> bool:
    # One class may serve several configurations (a union), and what `__init__` says is nearer to the truth than what
    # was inherited.
    declared = inspect.signature(model.__init__).parameters.get("config")
    if declared is not None and isinstance(declared.annotation, str):
        return declared.annotation.strip("\"'") == configuration.__name__
    annotation = declared.annotation if declared is not None else inspect.Parameter.empty
    if annotation is inspect.Parameter.empty or not _names_configuration(annotation):
        annotation = model.config_class
    return configuration in (typing.get_args(annotation) or (annotation,))


def _names_configuration(annotation: Any) -> bool:
    """Whether an annotation names a configuration of one model, or several of them; not just any configuration."""
    base = importlib.import_module("transformers").PreTrainedConfig
    kinds = typing.get_args(annotation) or (annotation,)
    return all(inspect.isclass(kind) and issubclass(kind, base) and kind is not base for kind in kinds)


def _from_auto_classes(model_type: str) -> list[type[nn.Module]]:
    """For types that have a name of their own and use another one's model."""
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
    if name.endswith(_PARTS) or (has_towers and name.endswith(_OF_ONE_TOWER)):
        return _PART
    for rank, ending in enumerate(ENDINGS):
        if name.endswith(ending):
            return rank
    return _OTHER_HEAD if "For" in name else _BARE if name.endswith("Model") else _PART


def configurations_in(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from configurations_in(value)
