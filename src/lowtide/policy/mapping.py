"""Reads the dict form: a policy's own field names, or the keywords that people pass to other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidValueError
from lowtide.policy.text import PARTS, WORDS, meaning, read_text, united
from lowtide.spelling import unknown
from lowtide.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from lowtide.policy.text import Fields


def read_mapping(mapping: Mapping[str, Any], own: list[str]) -> Fields:
    """The fields of a policy, of which `own` are the names."""
    fields: Fields = {}
    for key, value in mapping.items():
        told = _of_our_own(key, value) if key in own else _known_elsewhere(key, value)
        if told is None:
            raise InvalidValueError(_refusal(key, value, own))
        if key == "gradient_checkpointing_kwargs" and mapping.get("gradient_checkpointing") is False:
            continue  # they switch nothing on
        fields = united(fields, told)
    return fields if mapping.get("tile") is not False else {**fields, "tile": ()}


def _of_our_own(key: str, value: Any) -> Fields:
    return {key: _FORMS[key](value) if key in _FORMS else value}


def _known_elsewhere(key: str, value: Any) -> Fields | None:
    """What a keyword of another library says; None if it is not known, or not with such a value."""
    if key == "gradient_checkpointing_kwargs" and isinstance(value, Mapping | None):
        return _checkpointing_kwargs(value) if value is not None else {}
    if key == "tiled_mlp_num_shards":  # axolotl
        return {"tile_shards": value}
    if key in WORDS and isinstance(value, bool):
        return meaning(key) if value else {}
    if key == "activation_checkpointing" and isinstance(value, Mapping):
        return _deepspeed_block(value)
    return _choice(key, value) if key in _CHOICES else None


def _refusal(key: str, value: Any, own: list[str]) -> str:
    if key == "gradient_checkpointing_kwargs":
        return f"{key} must be a dict, got {value!r}"
    if key in WORDS:
        return f"{key} must be true or false, got {value!r}"
    return unknown(key, [*own, *WORDS], "setting of a policy")


def _rules(value: Any) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidValueError(
            f"overrides are pairs of a glob and a policy, like {{'visual.*': 'none'}}, not {value!r}"
        )
    return list(value.items() if isinstance(value, Mapping) else value)


def _place(value: Any) -> Any:
    return {True: "host", False: None}[value] if isinstance(value, bool) else value


def _parts_to_tile(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool) or value is None:
        return PARTS if value else ()
    if not isinstance(value, Iterable):
        raise InvalidValueError(f"tile is true, false or a list of {', '.join(PARTS)}, got {value!r}")
    return (value,) if isinstance(value, str) else tuple(value)


def _unless_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_FORMS: dict[str, Callable[[Any], Any]] = {
    "overrides": _rules,
    "offload": _place,
    "host_limit": _unless_none(parse_bytes),
    "disk_limit": _unless_none(parse_bytes),
    "disk": _unless_none(os.fspath),
    "tile": _parts_to_tile,
    "tile_tokens": _unless_none(parse_tokens),
    "loss_tokens": _unless_none(parse_tokens),
}
"""Fields whose values may be given in more than one form."""

_CHOICES: dict[str, dict[Any, str]] = {
    "activation_offloading": {"legacy": "recompute+offload", "hidden_states": "recompute+offload"},  # axolotl
    "use_gradient_checkpointing": {True: "recompute", False: "none", "unsloth": "recompute+offload"},  # unsloth
}


def _choice(key: str, value: Any) -> Fields:
    if not isinstance(value, str | bool) or value not in _CHOICES[key]:
        raise InvalidValueError(unknown(value, _CHOICES[key], f"value of {key}"))
    return read_text(_CHOICES[key][value])


def _deepspeed_block(block: Mapping[str, Any]) -> Fields:
    """DeepSpeed's `activation_checkpointing`: what is switched on is honoured or refused."""
    on = [key for key, value in block.items() if value]
    refused = [key for key in on if key != "cpu_checkpointing"]
    if refused:
        raise InvalidValueError(f"activation_checkpointing: {', '.join(refused)} cannot be honoured: switch it off")
    return meaning("cpu_checkpointing" if on else "recompute")


def _checkpointing_kwargs(kwargs: Mapping[str, Any]) -> Fields:
    """transformers' `gradient_checkpointing_kwargs`. `use_reentrant` is answered by one engine, whatever it says."""
    fields: Fields = {"recompute": True}
    for key, value in kwargs.items():
        if key == "every_n_layers":
            fields["every"] = value
        elif key == "offload":
            fields["offload"] = "host" if value else None
        elif key != "use_reentrant":
            raise InvalidValueError(
                unknown(key, ["use_reentrant", "every_n_layers", "offload"], "checkpointing setting")
            )
    return fields
