"""Reads the string form of a policy: `recompute+offload(host=8GiB); visual.*: recompute`.

Rules are separated by semicolons, words by plus signs, and a word's settings stand in brackets. The words are our own,
and those that people know from other libraries.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidValueError
from lowtide.spelling import unknown
from lowtide.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    Fields = dict[str, Any]
    """The fields of a policy that a word or a setting says. Rules are `overrides`, pairs of a glob and fields."""

WORDS: dict[str, Fields] = {
    "none": {},
    "recompute": {"recompute": True},
    "offload": {"offload": "host"},
    # transformers, accelerate, torchtune
    "gradient_checkpointing": {"recompute": True},
    "activation_checkpointing": {"recompute": True},
    "fsdp_activation_checkpointing": {"recompute": True},
    "fsdp_activation_checkpointing_offload": {"recompute": True, "offload": "host"},
    # TRL, axolotl, torchtune
    "activation_offloading": {"offload": "host"},
    "enable_activation_offloading": {"offload": "host"},
    "hidden_states": {"recompute": True, "offload": "host"},
    # DeepSpeed, Arctic, unsloth
    "cpu_checkpointing": {"recompute": True, "offload": "host"},
    "activation_checkpoint_cpu_offload": {"recompute": True, "offload": "host"},
    "unsloth": {"recompute": True, "offload": "host"},
    # tiling: ours, axolotl's, Arctic's, unsloth's
    "tile": {"tile": ("attention", "mlp", "loss")},
    "tiled_mlp": {"tile": ("mlp",)},
    "tiled_mlp_compute": {"tile": ("mlp",)},
    "unsloth_tiled_mlp": {"tile": ("mlp",)},
}

PARTS = ("attention", "mlp", "loss")
"""What can be tiled."""

PLACES = ("host", "disk")
"""Where to offload to."""

KEPT = ("attention", "matmul")
"""What can be kept by a word of ours; all else is an operator's name."""

OPERATOR = re.compile(r"\w+(::|\.)\w+(\.\w+)?")
"""The name of an operator: `aten.mm`, `aten.mm.default`, `mylib::op`."""


_RULE = re.compile(r"(?P<pattern>.+):(?![^(]*\))(?P<policy>.*)")
"""A rule: a glob, a colon that is not in brackets (an operator may have some in its name), and a policy."""

_PLUS = re.compile(r"\+(?![^(]*\))")
"""A plus sign between words, not in brackets: a directory may have one in its name."""

_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma between settings, not in a list."""

_TERM = re.compile(r"(?P<word>[\w.]+)\s*(?:\((?P<settings>[^()]*)\))?")

_EVERY = ("every", "every_n_layers")

_STORE_SETTINGS = ("host", "disk", "limit", "verify", "tmpfs")

_TILE_SETTINGS = {"tokens": "tile_tokens", "shards": "tile_shards", "loss_tokens": "loss_tokens"}


def read_text(text: str) -> Fields:
    """Return the fields of a policy that a string says."""
    default, *rules = (part.strip() for part in text.split(";"))
    overrides = []
    for rule in filter(None, rules):
        match = _RULE.fullmatch(rule)
        if match is None or not match["pattern"].strip():
            raise InvalidValueError(f"{rule!r} in policy {text!r} is not a rule: write it like 'visual.*: recompute'")
        overrides.append((match["pattern"].strip(), _read_words(match["policy"].strip(), text)))
    return {**_read_words(default, text), "overrides": overrides}


def read_word(word: str) -> Fields:
    """Return what a word means."""
    if word not in WORDS:
        raise InvalidValueError(unknown(word, WORDS, "policy word"))
    return dict(WORDS[word])


def merged(fields: Fields, more: Fields) -> Fields:
    """Return what both say: parts to tile and what to keep add up, and of everything else the later one counts."""
    added = {name: (*fields.get(name, ()), *more.get(name, ())) for name in ("tile", "keep")}
    return {**fields, **more, **{name: parts for name, parts in added.items() if parts}}


def _read_words(text: str, whole: str) -> Fields:
    fields: Fields = {}
    for part in _PLUS.split(text):
        match = _TERM.fullmatch(part.strip())
        if match is None:
            raise InvalidValueError(f"{part.strip()!r} in policy {whole!r} is not a word or word(setting=value)")
        settings = [setting.strip() for setting in _COMMA.split(match["settings"] or "") if setting.strip()]
        word = match["word"]
        more = read_word(word)
        more |= _tile_settings(settings, whole) if word == "tile" else _other_settings(word, settings, whole)
        fields = merged(fields, more)
    return fields


def _tile_settings(settings: list[str], whole: str) -> Fields:
    """Read `tile(attention, mlp, loss, tokens=8k, shards=8, loss_tokens=512)`: parts by name, sizes by value."""
    fields: Fields = {}
    parts = [setting for setting in settings if "=" not in setting]
    if parts:
        fields["tile"] = tuple(parts)
    for name, value in (_split(setting) for setting in settings if "=" in setting):
        if name not in _TILE_SETTINGS:
            raise InvalidValueError(f"policy {whole!r}: {unknown(name, _TILE_SETTINGS, 'tile setting')}")
        fields[_TILE_SETTINGS[name]] = parse_tokens(value)
    return fields


def _other_settings(word: str, settings: list[str], whole: str) -> Fields:
    """Read `recompute(every=2, keep=attention)`, and `offload(host=8GiB, disk=/scratch, limit=1TB, verify)`."""
    recomputes, offloads = (bool(WORDS[word].get(field)) for field in ("recompute", "offload"))
    fields: Fields = {}
    pairs = [_split(setting) for setting in settings]
    for name, value in pairs:
        if recomputes and name in _EVERY:
            fields["every"] = _whole_number(name, value, whole)
        elif recomputes and name == "keep":
            fields["keep"] = read_kept(value)
            if not fields["keep"]:
                raise InvalidValueError(f"keep in policy {whole!r} names nothing: write it like keep=attention")
        elif offloads and name in _STORE_SETTINGS:
            fields |= _store_setting(name, value, whole)
        else:
            known = [*(("every", "keep") if recomputes else ()), *(_STORE_SETTINGS if offloads else ())]
            problem = unknown(name, known, f"{word} setting") if known else f"{word} takes no settings, got {name!r}"
            raise InvalidValueError(f"policy {whole!r}: {problem}")
    names = [name for name, _ in pairs]
    if "disk" in names and "host" not in names:
        fields["offload"] = "disk"
    elif "disk" in names and not fields.get("disk"):
        raise InvalidValueError(f"policy {whole!r}: offload to host and disk needs offload(host=8GiB, disk=/scratch)")
    return fields


def read_kept(value: str) -> tuple[str, ...]:
    """Read what to keep: `attention+matmul`, or a list such as `[attention, aten.mm.default, mylib::op]`."""
    words = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    return tuple(word.strip() for word in re.split(r"[,+]", words) if word.strip())


def check_kept(words: Iterable[str]) -> None:
    """Refuse words that are none of ours and no operator's name."""
    for word in words:
        if word not in KEPT and OPERATOR.fullmatch(word) is None:
            problem = unknown(word, KEPT, "thing to keep")
            raise InvalidValueError(f"{problem} (an operator's name is like aten.mm.default or mylib::op)")


def _store_setting(name: str, value: str, whole: str) -> Fields:
    """Read a size or a directory by value, a switch by name; a place alone is a name, too: `offload(disk)`."""
    if name in ("host", "disk") and not value:
        return {}
    if name == "disk":
        return {"disk": value}
    if name in ("host", "limit"):
        return {{"host": "host_limit", "limit": "disk_limit"}[name]: parse_bytes(value)}
    if value.lower() not in ("", "true", "false"):
        raise InvalidValueError(f"{name} in policy {whole!r} must be true or false, got {value!r}")
    return {name: value.lower() != "false"}


def _whole_number(name: str, value: str, whole: str) -> int:
    if not value.isdigit():
        raise InvalidValueError(f"{name} in policy {whole!r} must be a whole number, got {value!r}")
    return int(value)


def _split(setting: str) -> tuple[str, str]:
    name, _, value = setting.partition("=")
    return name.strip(), value.strip()
