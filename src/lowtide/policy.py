"""What should happen to a region's activations: a frozen value, with a string and a dict form.

    none                            keep everything on the device
    recompute                       keep a region's inputs, run its forward again in backward
    recompute(every=2)              only every second region of a stack
    offload                         keep what autograd saves, but in pinned host memory
    recompute+offload               recompute, with the inputs in pinned host memory
    recompute+offload(host=8GiB)    ... of which at most 8 GiB
    recompute+offload(disk=/scratch)             recompute, with the inputs in a private file in /scratch
    recompute+offload(disk=/scratch, limit=1TB, verify)    ... of at most 1 TB per process, with checksums
    recompute+offload(host=8GiB, disk=/scratch)  host memory first, the disk past 8 GiB
    tile                            run MLPs, mixtures of experts and the loss in tiles of tokens
    tile(mlp, tokens=8k)            only MLPs and experts, in tiles of 8192 tokens (or shards=8: in eight tiles)
    tile(loss, loss_tokens=512)     only the loss
    recompute+offload+tile          all of it

Regions can be told apart by their module name: `"recompute+offload; visual.*: recompute; *.layers.0: none"`. The last
rule that fits a region wins. Words that people know from other libraries are understood; unknown ones are refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from lowtide.errors import InvalidValueError
from lowtide.units import format_bytes, parse_bytes, parse_tokens

_WORDS: dict[str, dict[str, Any]] = {
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
    "tile": {"tile": ("mlp", "loss")},
    "tiled_mlp": {"tile": ("mlp",)},
    "tiled_mlp_compute": {"tile": ("mlp",)},
    "unsloth_tiled_mlp": {"tile": ("mlp",)},
}

_PARTS = ("mlp", "loss")
_PLACES = ("host", "disk")

_TERM = re.compile(r"(?P<word>[\w.]+)\s*(?:\((?P<settings>[^()]*)\))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What should happen to a region's activations."""

    recompute: bool = False
    every: int = 1
    """Recompute every n-th region of a stack, starting with the first; the others are left alone."""
    offload: str | None = None
    """`"host"`: pinned memory. `"disk"`: a file. None: the device."""
    host_limit: int | None = None
    """The most bytes of pinned memory; past it, tensors go to `disk`, or stay and the report says so."""
    disk: str | None = None
    """The directory of the disk tier; beside `"host"`, it takes what is beyond `host_limit`."""
    disk_limit: int | None = None
    """The most bytes on disk for this process. None: its share of what is free."""
    verify: bool = False
    """Whether all that is read from disk is compared with a checksum."""
    tmpfs: bool = False
    """Whether `disk` may be a directory in memory."""
    tile: tuple[str, ...] = ()
    """What runs in tiles: `"mlp"` (mixtures of experts too), `"loss"`, or both."""
    tile_tokens: int | None = None
    """Tokens of an MLP's tile. None: from bytes."""
    tile_shards: int | None = None
    """The number of an MLP's tiles, instead of their size."""
    loss_tokens: int | None = None
    """Tokens of the loss's tile. None: from bytes."""
    overrides: tuple[tuple[str, Policy], ...] = ()
    """Pairs of a glob on the region's module name and the policy for it; the last that fits wins."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InvalidValueError(f"every must be 1 or more, got {self.every}")
        if self.every > 1 and not self.recompute:
            raise InvalidValueError("every says which regions are recomputed, so it needs recompute")
        self._check_store()
        self._check_rules()
        self._check_tiles()

    def _check_store(self) -> None:
        if self.offload not in (None, *_PLACES):
            raise InvalidValueError(_unknown(str(self.offload), list(_PLACES), "place to offload to"))
        if self.host_limit is not None and self.offload != "host":
            raise InvalidValueError("host_limit needs offload to the host")
        for name in ("host_limit", "disk_limit"):
            if (getattr(self, name) or 0) < 0:
                raise InvalidValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.disk is None:
            for name in ("disk_limit", "verify", "tmpfs"):
                if getattr(self, name):
                    raise InvalidValueError(f"{name} is a setting of the disk tier, and needs disk=/a/directory")
            return
        if self.offload is None or not self.disk or any(character in self.disk for character in ",;()"):
            raise InvalidValueError(
                f"disk={self.disk!r}: it needs offload, and a directory whose name has no comma, semicolon or bracket"
            )
        if self.offload == "host" and self.host_limit is None:
            raise InvalidValueError(
                "offload to the host without a limit never reaches the disk: write offload(host=8GiB, disk=...), or "
                "offload(disk=...)"
            )

    def _check_rules(self) -> None:
        """A model has one store, and its settings stand before the rules."""
        for pattern, policy in self.overrides:
            if policy.host_limit is not None:
                raise InvalidValueError("a limit of host memory holds for the whole model: give it before the rules")
            if policy.disk is not None:
                raise InvalidValueError("the disk tier is one for the whole model: give its directory before the rules")
            if "disk" in (policy.offload, self.offload) and policy.offload not in (None, self.offload):
                raise InvalidValueError(
                    f"the rule {pattern!r} offloads to the {policy.offload}, and what stands before the rules does "
                    "not: the model's store is chosen there, like 'recompute+offload(disk=/s); *.0: offload(disk)'"
                )

    def _check_tiles(self) -> None:
        for part in self.tile:
            if part not in _PARTS:
                raise InvalidValueError(_unknown(part, list(_PARTS), "part of a model to tile"))
        object.__setattr__(self, "tile", tuple(part for part in _PARTS if part in self.tile))  # in one order
        if any("loss" in policy.tile for _, policy in self.overrides):
            raise InvalidValueError("a model has one loss: give tile(loss) before the rules")
        if self.tile_tokens is not None and self.tile_shards is not None:
            raise InvalidValueError("tokens and shards both say how an MLP is cut: give one of them")
        for part, names in (("mlp", ("tile_tokens", "tile_shards")), ("loss", ("loss_tokens",))):
            for name in names:
                size = getattr(self, name)
                if size is not None and (size < 1 or part not in self.tile):
                    raise InvalidValueError(f"{name} must be 1 or more and needs tile({part}), got {size}")

    @classmethod
    def parse(cls, policy: Policy | str | Mapping[str, Any]) -> Policy:
        """A policy from any of its forms."""
        if isinstance(policy, Policy):
            return policy
        if isinstance(policy, str):
            return _from_string(policy)
        if isinstance(policy, Mapping):
            return _from_mapping(policy)
        raise InvalidValueError(f"a policy is a string, a dict or a Policy, not {type(policy).__name__}")

    def for_region(self, *names: str) -> Policy:
        """The policy for the region with this module name, without overrides; or for a part, known by two names."""
        chosen = dataclasses.replace(self, overrides=())
        for pattern, policy in self.overrides:
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                chosen = policy
        return chosen

    @property
    def is_none(self) -> bool:
        return not self.recompute and self.offload is None and not self.tile

    def __str__(self) -> str:
        return self._text(str)

    def describe(self) -> str:
        """As `str`, with sizes for people."""
        return self._text(format_bytes)

    def _text(self, size: Callable[[int], str]) -> str:
        terms = []
        if self.recompute:
            terms.append("recompute" if self.every == 1 else f"recompute(every={self.every})")
        if self.offload:
            settings = self._store_settings(size)
            terms.append(f"offload({', '.join(settings)})" if settings else "offload")
        if self.tile:
            sizes = [("tokens", self.tile_tokens), ("shards", self.tile_shards), ("loss_tokens", self.loss_tokens)]
            settings = [*self.tile, *(f"{name}={count}" for name, count in sizes if count is not None)]
            terms.append("tile" if settings == list(_PARTS) else f"tile({', '.join(settings)})")
        rules = [f"{pattern}: {policy._text(size)}" for pattern, policy in self.overrides]
        return "; ".join(["+".join(terms) or "none", *rules])

    def _store_settings(self, size: Callable[[int], str]) -> list[str]:
        settings = [] if self.host_limit is None else [f"host={size(self.host_limit)}"]
        if self.disk is not None:
            settings.append(f"disk={self.disk}")
        elif self.offload == "disk":
            settings.append("disk")
        if self.disk_limit is not None:
            settings.append(f"limit={size(self.disk_limit)}")
        return [*settings, *(name for name in ("verify", "tmpfs") if getattr(self, name))]


def _from_string(text: str) -> Policy:
    default, *rules = (part.strip() for part in text.split(";"))
    overrides = []
    for rule in filter(None, rules):
        pattern, colon, policy = rule.rpartition(":")
        if not colon or not pattern.strip():
            raise InvalidValueError(f"{rule!r} in policy {text!r} is no rule: write it like 'visual.*: recompute'")
        overrides.append((pattern.strip(), Policy(**_terms(policy.strip(), text))))
    return Policy(**_terms(default, text), overrides=tuple(overrides))


def _terms(text: str, whole: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for part in re.split(r"\+(?![^(]*\))", text):
        match = _TERM.fullmatch(part.strip())
        if match is None:
            raise InvalidValueError(f"{part.strip()!r} in policy {whole!r} is not a word or word(setting=value)")
        settings = [setting.strip() for setting in (match["settings"] or "").split(",") if setting.strip()]
        fields |= _meaning(match["word"])
        if match["word"] == "tile":
            fields |= _tile_settings(settings, whole)
            continue
        for setting in settings:
            fields |= _setting(match["word"], setting, whole)
        names = [setting.partition("=")[0].strip() for setting in settings]
        if "disk" in names and "host" not in names:
            fields["offload"] = "disk"
        elif "disk" in names and not fields.get("disk"):
            raise InvalidValueError(
                f"policy {whole!r}: offload to host and disk needs offload(host=8GiB, disk=/scratch)"
            )
    return fields


def _tile_settings(settings: list[str], whole: str) -> dict[str, Any]:
    """`tile(mlp, loss, tokens=8k, shards=8, loss_tokens=512)`: parts by name, sizes by value."""
    fields: dict[str, Any] = {}
    parts = [setting for setting in settings if "=" not in setting]
    if parts:
        fields["tile"] = tuple(parts)
    known = {"tokens": "tile_tokens", "shards": "tile_shards", "loss_tokens": "loss_tokens"}
    for name, _, value in (setting.partition("=") for setting in settings if "=" in setting):
        if name.strip() not in known:
            raise InvalidValueError(f"policy {whole!r}: {_unknown(name.strip(), list(known), 'setting of tile')}")
        fields[known[name.strip()]] = parse_tokens(value.strip())
    return fields


def _meaning(word: str) -> dict[str, Any]:
    if word not in _WORDS:
        raise InvalidValueError(_unknown(word, list(_WORDS), "word of a policy"))
    return dict(_WORDS[word])


def _setting(word: str, setting: str, whole: str) -> dict[str, Any]:
    name, _, value = (part.strip() for part in setting.partition("="))
    if _WORDS[word].get("recompute") and name in ("every", "every_n_layers"):
        if not value.isdigit():
            raise InvalidValueError(f"{name} in policy {whole!r} must be a whole number, got {value!r}")
        return {"every": int(value)}
    if _WORDS[word].get("offload") and name in _STORE_SETTINGS:
        return _store_setting(name, value, whole)
    known = ["every"] if _WORDS[word].get("recompute") else []
    known += _STORE_SETTINGS if _WORDS[word].get("offload") else []
    raise InvalidValueError(f"policy {whole!r}: {_unknown(name, known, f'setting of {word}')}")


_STORE_SETTINGS = ("host", "disk", "limit", "verify", "tmpfs")


def _store_setting(name: str, value: str, whole: str) -> dict[str, Any]:
    """`offload(host=8GiB, disk=/scratch, limit=1TB, verify)`: sizes and a directory by value, switches by name."""
    if name == "disk":
        return {"disk": value} if value else {}
    if name in ("host", "limit"):
        return {{"host": "host_limit", "limit": "disk_limit"}[name]: parse_bytes(value)} if value else {}
    if value.lower() not in ("", "true", "false"):
        raise InvalidValueError(f"{name} in policy {whole!r} is true or false, got {value!r}")
    return {name: value.lower() != "false"}


def _from_mapping(mapping: Mapping[str, Any]) -> Policy:
    """Own field names, or the keywords that people pass to other libraries."""
    fields: dict[str, Any] = {}
    known = [field.name for field in dataclasses.fields(Policy)]
    for key, value in mapping.items():
        if key in known:
            fields[key] = _OWN_FIELDS[key](value) if key in _OWN_FIELDS else value
        elif key == "gradient_checkpointing_kwargs":
            fields |= _checkpointing_kwargs(value)
        elif key == "tiled_mlp_num_shards":  # axolotl
            fields["tile_shards"] = value
        elif key in _WORDS and isinstance(value, bool):
            fields |= _meaning(key) if value else {}
        elif key == "activation_checkpointing" and isinstance(value, Mapping):
            fields |= _deepspeed_block(value)
        elif key in _CHOICES:
            fields |= _choice(key, value)
        else:
            raise InvalidValueError(_unknown(key, [*known, *_WORDS], "setting of a policy"))
    return Policy(**fields)


def _rules(value: Any) -> tuple[tuple[str, Policy], ...]:
    rules = value.items() if isinstance(value, Mapping) else value
    return tuple((pattern, Policy.parse(policy)) for pattern, policy in rules)


def _place(value: Any) -> Any:
    return {True: "host", False: None}[value] if isinstance(value, bool) else value


def _parts_to_tile(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return _PARTS if value else ()
    return (value,) if isinstance(value, str) else tuple(value)


def _tokens(value: int | str | None) -> int | None:
    return None if value is None else parse_tokens(value)


_OWN_FIELDS: dict[str, Callable[[Any], Any]] = {
    "overrides": _rules,
    "offload": _place,
    "host_limit": lambda value: None if value is None else parse_bytes(value),
    "disk_limit": lambda value: None if value is None else parse_bytes(value),
    "disk": lambda value: None if value is None else os.fspath(value),
    "tile": _parts_to_tile,
    "tile_tokens": _tokens,
    "loss_tokens": _tokens,
}
"""Fields whose values may be given in more than one form."""


_CHOICES: dict[str, dict[Any, str]] = {
    "activation_offloading": {"legacy": "recompute+offload", "hidden_states": "recompute+offload"},  # axolotl
    "use_gradient_checkpointing": {True: "recompute", False: "none", "unsloth": "recompute+offload"},  # unsloth
}


def _choice(key: str, value: Any) -> dict[str, Any]:
    if value not in _CHOICES[key]:
        raise InvalidValueError(_unknown(str(value), [str(known) for known in _CHOICES[key]], f"value of {key}"))
    return _terms(_CHOICES[key][value], value)


def _deepspeed_block(block: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's `activation_checkpointing`: what is switched on is honoured or refused."""
    on = [key for key, value in block.items() if value]
    refused = [key for key in on if key != "cpu_checkpointing"]
    if refused:
        raise InvalidValueError(f"activation_checkpointing: {', '.join(refused)} cannot be honoured: switch it off")
    return _meaning("cpu_checkpointing" if on else "recompute")


def _checkpointing_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' `gradient_checkpointing_kwargs`. `use_reentrant` is answered by one engine, whatever it says."""
    fields: dict[str, Any] = {"recompute": True}
    for key, value in kwargs.items():
        if key == "every_n_layers":
            fields["every"] = value
        elif key == "offload":
            fields["offload"] = "host" if value else None
        elif key != "use_reentrant":
            raise InvalidValueError(
                _unknown(key, ["use_reentrant", "every_n_layers", "offload"], "checkpointing setting")
            )
    return fields


def _unknown(word: str, known: list[str], what: str) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"{word!r} is no {what}; {hint}"
