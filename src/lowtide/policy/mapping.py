"""Reads the dict form of a policy: its own field names, or the keywords that people pass to other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidValueError
from lowtide.policy.text import PARTS, WORDS, merged, read_kept, read_text, read_word
from lowtide.spelling import unknown
from lowtide.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from lowtide.policy.text import Fields


def read_mapping(mapping: Mapping[str, Any], field_names: list[str]) -> Fields:
    """Return the fields of a policy that a mapping says. `field_names` are the names of all fields."""
    fields: Fields = {}
    for key, value in mapping.items():
        more = _read_own(key, value) if key in field_names else _read_foreign(key, value)
        if more is None:
            raise InvalidValueError(_refusal(key, value, field_names))
        if key == "gradient_checkpointing_kwargs" and mapping.get("gradient_checkpointing") is False:
            continue  # they switch nothing on
        fields = merged(fields, more)
    return fields if mapping.get("tile") is not False else {**fields, "tile": ()}


def _read_own(key: str, value: Any) -> Fields:
    return {key: _READERS[key](value) if key in _READERS else value}


def _read_foreign(key: str, value: Any) -> Fields | None:
    """Return what a keyword of another library means; None if it is not known, or not with such a value."""
    if key == "gradient_checkpointing_kwargs" and isinstance(value, Mapping | None):
        return _checkpointing_kwargs(value) if value is not None else {}
    if key == "tiled_mlp_num_shards":  # axolotl
        return {"tile_shards": value}
    if key in WORDS and isinstance(value, bool):
        return read_word(key) if value else {}
    if key == "activation_checkpointing" and isinstance(value, Mapping):
        return _deepspeed_section(value)
    return _read_choice(key, value) if key in _CHOICES else None


def _refusal(key: str, value: Any, field_names: list[str]) -> str:
    if key == "gradient_checkpointing_kwargs":
        return f"{key} must be a dict, got {value!r}"
    if key in WORDS:
        return f"{key} must be true or false, got {value!r}"
    return unknown(key, [*field_names, *WORDS], "policy setting")


def _read_rules(value: Any) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidValueError(
            f"overrides must be pairs of a glob and a policy, like {{'visual.*': 'none'}}, not {value!r}"
        )
    return list(value.items() if isinstance(value, Mapping) else value)


def _read_place(value: Any) -> Any:
    return {True: "host", False: None}[value] if isinstance(value, bool) else value


def _read_parts(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool) or value is None:
        return PARTS if value else ()
    if not isinstance(value, Iterable):
        raise InvalidValueError(f"tile must be true, false or a list of {', '.join(PARTS)}, got {value!r}")
    return (value,) if isinstance(value, str) else tuple(value)


def _read_kept(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple | None):
        raise InvalidValueError(f"keep must be a string or a list of names, like 'attention+matmul', got {value!r}")
    return read_kept(value) if isinstance(value, str) else tuple(value or ())


def _unless_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "overrides": _read_rules,
    "offload": _read_place,
    "host_limit": _unless_none(parse_bytes),
    "disk_limit": _unless_none(parse_bytes),
    "disk": _unless_none(os.fspath),
    "keep": _read_kept,
    "tile": _read_parts,
    "tile_tokens": _unless_none(parse_tokens),
    "loss_tokens": _unless_none(parse_tokens),
}
"""How to read the fields whose values may be given in more than one form."""

_CHOICES: dict[str, dict[Any, str]] = {
    "activation_offloading": {"legacy": "recompute+offload", "hidden_states": "recompute+offload"},  # axolotl
    "use_gradient_checkpointing": {True: "recompute", False: "none", "unsloth": "recompute+offload"},  # unsloth
}
"""Keywords of other libraries that take one of a few values, each with the policy that it means."""


def _read_choice(key: str, value: Any) -> Fields:
    if not isinstance(value, str | bool) or value not in _CHOICES[key]:
        raise InvalidValueError(unknown(value, _CHOICES[key], f"{key} value"))
    return read_text(_CHOICES[key][value])


def _deepspeed_section(section: Mapping[str, Any]) -> Fields:
    """Read DeepSpeed's `activation_checkpointing`: what is switched on is honoured or refused."""
    on = [key for key, value in section.items() if value]
    refused = [key for key in on if key != "cpu_checkpointing"]
    if refused:
        raise InvalidValueError(f"activation_checkpointing: {', '.join(refused)} cannot be honoured: switch it off")
    return read_word("cpu_checkpointing" if on else "recompute")


def _read_selective(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, bool | None):
        raise InvalidValueError(f"{key} must be true or false, got {value!r}")
    return ("attention",) if value else ()


def _checkpointing_kwargs(kwargs: Mapping[str, Any]) -> Fields:
    """Read transformers' `gradient_checkpointing_kwargs`. There is one engine, whatever `use_reentrant` says."""
    fields: Fields = {"recompute": True}
    for key, value in kwargs.items():
        if key == "every_n_layers":
            fields["every"] = value
        elif key == "offload":
            fields["offload"] = "host" if value else None
        elif key == "selective":  # TRL
            fields["keep"] = _read_selective(key, value)
        elif key != "use_reentrant":
            known = ["use_reentrant", "every_n_layers", "offload", "selective"]
            raise InvalidValueError(unknown(key, known, "gradient_checkpointing_kwargs setting"))
    return fields
