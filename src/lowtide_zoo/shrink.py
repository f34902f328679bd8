"""Token ids that stay consistent when a vocabulary shrinks.

Ids beyond the small vocabulary move to its upper end, the same id to the same place all over a configuration and those
inside it. Placeholders of pictures, sound and video get a place of their own in any case: they must never be met by
chance in plain text.

Rotary positions that fit the small heads.

Shrinks the defaults of a configuration class to those of a tiny model of the same architecture.

Integers shrink by the rules for their names, lists by what they describe: the kinds of layers, the sizes of stages.
Every kind of layer stays, and occurs twice. The small values go through the configuration's own constructor, which
derives and validates the rest.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from lowtide_zoo.classes import configuration_class, field_names, is_configuration, is_in_source, read
from lowtide_zoo.layers import doubling_width, is_staged, layer_fields, shrink_stages, small_backbone
from lowtide_zoo.overrides import override_fields, set_attributes
from lowtide_zoo.size_profile import SizeProfile, bound_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Marks at the beginning of a vocabulary (padding, begin, end) stay where they are.
LOWEST_MOVED = 8

NAMES = re.compile(r".*token_(id|index|ids)|.*_(tok|token|start|end|newline|patch|bos|eos|pad)_id|.*_(token|index)")

NOT_TOKENS = re.compile(r".*(ignore|loss|layer|head|merge|decode|unk|mask|lang|bos|eos|pad)_index|.*_per_token|lang_id")

PLACEHOLDERS = re.compile(r".*(image|img|video|audio|vision|visual|speech|media|protein|frame|pixel|modality)_.*")

# Missed by models that are given pictures or sound, where a configuration leaves them open.
PLACEHOLDER_FIELDS = {"image_token_id", "image_token_index", "audio_token_id", "audio_token_index"}

PLACEHOLDER_FIELDS |= {"video_token_id", "video_token_index"}


class TokenIds:
    """Hands out ids from the end of a small vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self._next = vocabulary - 1
        self._moved: dict[Any, int] = {}

    def move(self, name: str, value: int) -> int:
        """The new id for the one that a field has."""
        if value < 0:
            return value
        is_placeholder = PLACEHOLDERS.fullmatch(name) is not None
        if value < LOWEST_MOVED and not is_placeholder:
            return value
        if value not in self._moved:
            self._moved[value] = self.new()
        return self._moved[value]

    def new(self) -> int:
        """An id that nothing else has."""
        self._next -= 1
        return self._next + 1


def is_token_id(name: str) -> bool:
    """Whether a field of this name holds the id of a token."""
    return NAMES.fullmatch(name) is not None and NOT_TOKENS.fullmatch(name) is None


# Fewer rotated pairs than this do not hold the sections for time, height and width.
LEAST_SHARE = 0.5


def shrink_rotary(config: Any, head_dim: int) -> dict[str, Any]:
    """The rotary parameters, where they say how the pairs of a head are divided among time, height and width."""
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
    """Whether the model falls back on sections of its own, which then belong to large heads."""
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
        share = parameters["partial_rotary_factor"] = max(share, LEAST_SHARE)
    pairs = int(head_dim * (share or 1.0)) // 2
    first = pairs - (len(sections) - 1) * (pairs // len(sections))
    parameters["mrope_section"] = [first] + [pairs // len(sections)] * (len(sections) - 1)


# Randomness that does not come from torch, or that leaves out whole layers, is off; and the last layer of a tower is
# read, not the one before it, so that all layers have gradients.
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

# Sizes that some configurations leave open, and their models then miss.
_UNSET: dict[str, Callable[[SizeProfile], int]] = {
    "vocab_size": lambda plan: plan.vocabulary,
    "head_dim": lambda plan: plan.head_dim,
    "num_key_value_heads": lambda plan: plan.heads,
    "context_length": lambda _: 8,
    "prediction_length": lambda _: 4,
    "num_experts_per_tok": lambda _: 2,
}


def shrink(config: Any, plan: SizeProfile, tokens: TokenIds | None = None) -> Any:
    """A tiny configuration of the same class as this default one."""
    tokens = tokens or TokenIds(plan.vocabulary)
    names = field_names(config)
    changed: dict[str, Any] = _extras(config)
    for name in names:
        value = read(config, name)
        small = _shrink_field(config, name, value, plan, tokens)
        if is_configuration(value) or small != value or not _is_default(config, name, value):
            changed[name] = small
    for name, value in layer_fields(config, names).items():
        changed[name] = _bounded(name, value, plan)
    changed |= shrink_rotary(config, plan.head_dim)
    changed |= {name: shrink(tower, plan, tokens) for name, tower in _towers_left_out(config)}
    changed |= _heads_of_state_spaces(config, names, changed.get("hidden_size", read(config, "hidden_size")), plan)
    changed |= {name: value for name, value in _SETTINGS.items() if isinstance(read(config, name), int | float)}
    override_fields(config.model_type, changed)
    small_config = type(config)(**changed)
    set_attributes(small_config)
    return small_config


def _extras(config: Any) -> dict[str, Any]:
    """What a configuration was given beyond its fields."""
    known = vars(type(config)()).keys() | {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in vars(config).items() if name not in known and not name.startswith("_")}


def _towers_left_out(config: Any) -> Iterator[tuple[str, Any]]:
    """Towers that a model can have and does not have by default."""
    for name, tower in getattr(type(config), "sub_configs_defaults", {}).items():
        if read(config, name) is not None:
            continue
        if dataclasses.is_dataclass(tower) and isinstance(tower, type):
            yield name, tower()
        elif tower.model_type is not None:
            yield name, configuration_class(tower.model_type)(**(tower.init_kwargs or {}))


def _bounded(name: str, value: Any, plan: SizeProfile) -> Any:
    """Sizes may be listed for each layer, too."""
    if isinstance(value, list) and "layer" not in name and not name.startswith("out_"):
        return [bound_of(name, entry, plan) if type(entry) is int else entry for entry in value]
    return value


def _is_default(config: Any, name: str, value: Any) -> bool:
    """Whether a field has the value that its class gives it; towers of others often have their own."""
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    if field.default is not dataclasses.MISSING and value == field.default:
        return True
    return bool(value == read(type(config)(), name))


def _shrink_field(config: Any, name: str, value: Any, plan: SizeProfile, tokens: TokenIds) -> Any:
    if value is None:
        return tokens.new() if name in PLACEHOLDER_FIELDS else _UNSET[name](plan) if name in _UNSET else None
    if is_configuration(value):
        return small_backbone() if value.model_type == "timm_backbone" else shrink(value, plan, tokens)
    if type(value) is int:
        return tokens.move(name, value) if is_token_id(name) else _shrink_integer(config, name, value, plan)
    if isinstance(value, list | tuple) and value:
        return type(value)(_shrink_list(config, name, value, plan, tokens))
    return value


def _shrink_list(config: Any, name: str, value: Sequence[Any], plan: SizeProfile, tokens: TokenIds) -> Sequence[Any]:
    if name == "image_grid_pinpoints":
        # Wide, high, and twice as large as what the tower sees.
        return [[plan.image, 2 * plan.image], [2 * plan.image, plan.image], [2 * plan.image, 2 * plan.image]]
    if not all(type(entry) is int for entry in value):
        return value
    if is_token_id(name):
        return [tokens.move(name, entry) for entry in value]
    return shrink_stages(config, name, value, plan)


# Windows are counted in patches, or, if larger than this, in pixels.
_LARGEST_WINDOW_OF_PATCHES = 32

# How much smaller the last of several stages usually is.
_SHRINKAGE = 32


def _shrink_integer(config: Any, name: str, value: int, plan: SizeProfile) -> int:
    if name in {"image_size", "pretrain_image_size", "spec_size"} and is_staged(config):
        return min(value, plan.staged_image)
    if name == "window_size":
        return min(value, _window(config, value, plan))
    if name == "encoder_stride" and not is_staged(config):
        # By how much a decoder enlarges what patches made small.
        return min(value, plan.patch)
    if name == doubling_width(config):
        return min(value, plan.width // 4)
    if "heads" in name and re.search(r"key_value|kv", name) and value > 1:
        return min(value, plan.heads if value == _query_heads(config) else plan.heads // 2)
    return bound_of(name, value, plan)


def _window(config: Any, value: int, plan: SizeProfile) -> int:
    if value > _LARGEST_WINDOW_OF_PATCHES:
        return 4 * plan.patch
    return plan.staged_image // _SHRINKAGE if is_staged(config) else bound_of("window_size", value, plan)


def _query_heads(config: Any) -> int | None:
    names = ("num_attention_heads", "num_heads", "n_head", "encoder_num_attention_heads")
    return next((read(config, name) for name in names if type(read(config, name)) is int), None)


_STATE_SPACE_HEADS = (
    ("num_heads", "head_dim"),
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
    ("mamba_num_heads", "mamba_head_dim"),
)


def _heads_of_state_spaces(config: Any, names: Sequence[str], width: Any, plan: SizeProfile) -> dict[str, int]:
    """Their heads must cover the expanded width."""
    expand = next(
        (read(config, n) for n in ("expand", "mamba_expand") if isinstance(read(config, n), int | float)), None
    )
    if expand is None or not isinstance(width, int):
        return {}
    found: dict[str, int] = {}
    for heads, head_dim in _STATE_SPACE_HEADS:
        if heads in names and head_dim in names and read(config, head_dim) is not None:
            found |= {head_dim: plan.head_dim, heads: int(expand * width) // plan.head_dim}
    return found
