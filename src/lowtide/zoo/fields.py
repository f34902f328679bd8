"""Reading the fields of a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

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
