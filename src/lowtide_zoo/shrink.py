"""Makes a tiny configuration of an architecture out of its default one.

Integers shrink by the rules for their names (`size_profile`), lists by what they describe: the kinds of layers, the
sizes of stages (`layers`). Every kind of layer stays, and occurs twice. The small values go through the configuration's
own constructor, which derives and validates the rest.

Token ids stay consistent when the vocabulary shrinks. Ids beyond the small vocabulary move to its upper end, the same
id to the same place in a configuration and in those nested in it. Placeholders for images, audio and video always get
an id that nothing else has: they must never occur by chance in plain text.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from lowtide_zoo.classes import configuration_class, field_names, get_field, is_configuration, is_in_source
from lowtide_zoo.layers import doubling_width, is_staged, layer_fields, shrink_stages, small_backbone
from lowtide_zoo.overrides import override_fields, set_attributes
from lowtide_zoo.size_profile import SizeProfile, bound_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Random choices that are not drawn from torch, or that skip whole layers, are off. The last layer of a tower is read,
# not the one before it, so that all layers have gradients.
_SETTINGS: dict[str, Any] = {
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "speech_encoder_layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "vision_feature_layer": -1,
}

# Sizes that some configurations leave unset although their models need them.
_UNSET: dict[str, Callable[[SizeProfile], int]] = {
    "vocab_size": lambda profile: profile.vocabulary,
    "head_dim": lambda profile: profile.head_dim,
    "num_key_value_heads": lambda profile: profile.heads,
    "context_length": lambda _: 8,
    "prediction_length": lambda _: 4,
    "num_experts_per_tok": lambda _: 2,
}

# Placeholders that some configurations leave unset although their models need them to be given images or audio.
_UNSET_PLACEHOLDERS = {
    "image_token_id",
    "image_token_index",
    "audio_token_id",
    "audio_token_index",
    "video_token_id",
    "video_token_index",
}

# Windows are counted in patches, or, if larger than this, in pixels.
_LARGEST_WINDOW_OF_PATCHES = 32

# How much smaller the last of several stages usually is.
_STAGES_SHRINK_BY = 32

# Rotating less than this share of a head leaves too few pairs for the sections of time, height and width.
_LEAST_ROTATED_SHARE = 0.5

_STATE_SPACE_HEADS = (
    ("num_heads", "head_dim"),
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
    ("mamba_num_heads", "mamba_head_dim"),
)

# Padding, begin and end marks at the start of a vocabulary stay where they are.
_LOWEST_MOVED_ID = 8

_TOKEN_IDS = re.compile(
    r".*token_(id|index|ids)|.*_(tok|token|start|end|newline|patch|bos|eos|pad)_id|.*_(token|index)"
)

_NOT_TOKEN_IDS = re.compile(
    r".*(ignore|loss|layer|head|merge|decode|unk|mask|lang|bos|eos|pad)_index|.*_per_token|lang_id"
)

_PLACEHOLDERS = re.compile(r".*(image|img|video|audio|vision|visual|speech|media|protein|frame|pixel|modality)_.*")


def shrink(config: Any, profile: SizeProfile, tokens: TokenIds | None = None) -> Any:
    """Return a tiny configuration of the same class as this default one."""
    tokens = tokens or TokenIds(profile.vocabulary)
    names = field_names(config)
    changed: dict[str, Any] = _extra_attributes(config)
    for name in names:
        value = get_field(config, name)
        small = _shrink_field(config, name, value, profile, tokens)
        if is_configuration(value) or small != value or not _is_default(config, name, value):
            changed[name] = small
    for name, value in layer_fields(config, names).items():
        changed[name] = _bound_entries(name, value, profile)
    changed |= _shrink_rotary(config, profile.head_dim)
    changed |= {name: shrink(tower, profile, tokens) for name, tower in _optional_towers(config)}
    changed |= _state_space_heads(config, names, changed.get("hidden_size", get_field(config, "hidden_size")), profile)
    changed |= {name: value for name, value in _SETTINGS.items() if isinstance(get_field(config, name), int | float)}
    override_fields(config.model_type, changed)
    small_config = type(config)(**changed)
    set_attributes(small_config)
    return small_config


def _extra_attributes(config: Any) -> dict[str, Any]:
    """Return what a configuration was given beyond its fields."""
    known = vars(type(config)()).keys() | {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in vars(config).items() if name not in known and not name.startswith("_")}


def _optional_towers(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the towers that a model can have and does not have by default."""
    for name, tower in getattr(type(config), "sub_configs_defaults", {}).items():
        if get_field(config, name) is not None:
            continue
        if dataclasses.is_dataclass(tower) and isinstance(tower, type):
            yield name, tower()
        elif tower.model_type is not None:
            yield name, configuration_class(tower.model_type)(**(tower.init_kwargs or {}))


def _bound_entries(name: str, value: Any, profile: SizeProfile) -> Any:
    """Bound the sizes in a list with one size per layer."""
    if isinstance(value, list) and "layer" not in name and not name.startswith("out_"):
        return [bound_of(name, entry, profile) if type(entry) is int else entry for entry in value]
    return value


def _is_default(config: Any, name: str, value: Any) -> bool:
    """Tell whether a field has its class's default; a tower often differs from the defaults of its class."""
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    if field.default is not dataclasses.MISSING and value == field.default:
        return True
    return bool(value == get_field(type(config)(), name))


def _shrink_field(config: Any, name: str, value: Any, profile: SizeProfile, tokens: TokenIds) -> Any:
    if value is None:
        return tokens.new() if name in _UNSET_PLACEHOLDERS else _UNSET[name](profile) if name in _UNSET else None
    if is_configuration(value):
        return small_backbone() if value.model_type == "timm_backbone" else shrink(value, profile, tokens)
    if type(value) is int:
        return tokens.move(name, value) if is_token_id(name) else _shrink_integer(config, name, value, profile)
    if isinstance(value, list | tuple) and value:
        return type(value)(_shrink_list(config, name, value, profile, tokens))
    return value


def _shrink_list(config: Any, name: str, value: Sequence[Any], profile: SizeProfile, tokens: TokenIds) -> Sequence[Any]:
    if name == "image_grid_pinpoints":
        # Wide, high, and twice as large as what the tower sees.
        side = profile.image
        return [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    if not all(type(entry) is int for entry in value):
        return value
    if is_token_id(name):
        return [tokens.move(name, entry) for entry in value]
    return shrink_stages(config, name, value, profile)


def _shrink_integer(config: Any, name: str, value: int, profile: SizeProfile) -> int:
    if name in {"image_size", "pretrain_image_size", "spec_size"} and is_staged(config):
        return min(value, profile.staged_image)
    if name == "window_size":
        return min(value, _window(config, value, profile))
    if name == "encoder_stride" and not is_staged(config):
        # A decoder enlarges by this what the patches made small.
        return min(value, profile.patch)
    if name == doubling_width(config):
        return min(value, profile.width // 4)
    if "heads" in name and re.search(r"key_value|kv", name) and value > 1:
        return min(value, profile.heads if value == _query_heads(config) else profile.heads // 2)
    return bound_of(name, value, profile)


def _window(config: Any, value: int, profile: SizeProfile) -> int:
    if value > _LARGEST_WINDOW_OF_PATCHES:
        return 4 * profile.patch
    return profile.staged_image // _STAGES_SHRINK_BY if is_staged(config) else bound_of("window_size", value, profile)


def _query_heads(config: Any) -> int | None:
    names = ("num_attention_heads", "num_heads", "n_head", "encoder_num_attention_heads")
    return next((get_field(config, name) for name in names if type(get_field(config, name)) is int), None)


def _state_space_heads(config: Any, names: Sequence[str], width: Any, profile: SizeProfile) -> dict[str, int]:
    """Return numbers of state-space heads that cover the expanded width, as they must."""
    expand = next(
        (get_field(config, n) for n in ("expand", "mamba_expand") if isinstance(get_field(config, n), int | float)),
        None,
    )
    if expand is None or not isinstance(width, int):
        return {}
    found: dict[str, int] = {}
    for heads, head_dim in _STATE_SPACE_HEADS:
        if heads in names and head_dim in names and get_field(config, head_dim) is not None:
            found |= {head_dim: profile.head_dim, heads: int(expand * width) // profile.head_dim}
    return found


def _shrink_rotary(config: Any, head_dim: int) -> dict[str, Any]:
    """Fit the rotary parameters to small heads, where they divide a head's pairs among time, height and width."""
    parameters = vars(config).get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    small = copy.deepcopy(parameters)
    if "mrope_section" not in str(parameters):
        if not _has_built_in_sections(config):
            return {}
        small["mrope_section"] = [1, 1, 1]
    _fit_sections(small, head_dim)
    return {"rope_parameters": small}


def _has_built_in_sections(config: Any) -> bool:
    """Tell whether the model's code falls back on sections that it has built in, which are made for large heads."""
    return hasattr(config, "vocab_size") and is_in_source(config.__class__, '"mrope_section"')


def _fit_sections(parameters: dict[str, Any], head_dim: int) -> None:
    for value in list(parameters.values()):
        if isinstance(value, dict):
            _fit_sections(value, head_dim)
    sections = parameters.get("mrope_section")
    if not sections:
        return
    share = parameters.get("partial_rotary_factor")
    if share is not None:
        share = parameters["partial_rotary_factor"] = max(share, _LEAST_ROTATED_SHARE)
    pairs = int(head_dim * (share or 1.0)) // 2
    first = pairs - (len(sections) - 1) * (pairs // len(sections))
    parameters["mrope_section"] = [first] + [pairs // len(sections)] * (len(sections) - 1)


class TokenIds:
    """The ids at the upper end of a small vocabulary, handed out one by one."""

    def __init__(self, vocabulary: int) -> None:
        self._next = vocabulary - 1
        self._moved: dict[Any, int] = {}

    def move(self, name: str, value: int) -> int:
        """Return the new id for the one that the field `name` has."""
        if value < 0:
            return value
        is_placeholder = _PLACEHOLDERS.fullmatch(name) is not None
        if value < _LOWEST_MOVED_ID and not is_placeholder:
            return value
        if value not in self._moved:
            self._moved[value] = self.new()
        return self._moved[value]

    def new(self) -> int:
        """Return an id that nothing else has."""
        self._next -= 1
        return self._next + 1


def is_token_id(name: str) -> bool:
    """Tell whether a field of this name holds the id of a token."""
    return _TOKEN_IDS.fullmatch(name) is not None and _NOT_TOKEN_IDS.fullmatch(name) is None
