"""Reads the policy that an axolotl configuration asks for: by Lowtide's own key, or in axolotl's words; never both.

    lowtide: recompute+offload+tile

is a policy in any of its forms. Without that key, axolotl's words are honoured as the policy that they mean and taken
out of the configuration, so that axolotl does not act on them as well. What cannot be honoured is refused: nothing is
ignored. The module knows axolotl's words, and does not import it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidValueError
from lowtide.policy import Policy
from lowtide.policy.text import OPERATOR
from lowtide.spelling import unknown

if TYPE_CHECKING:
    from collections.abc import MutableMapping

KEY = "lowtide"

_WORDS = (
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "selective_checkpointing",
    "activation_offloading",
    "tiled_mlp",
    "tiled_mlp_num_shards",
)
"""The words of axolotl that are honoured, and then taken out of the configuration."""

_REFUSED = {
    "fsdp_config.activation_checkpointing": "every region would be recomputed twice; set it to false",
    "fsdp_config.fsdp_activation_checkpointing": "every region would be recomputed twice; set it to false",
}
"""The settings of axolotl that cannot be honoured, each with the reason and the remedy."""

logger = logging.getLogger(__name__)


def take_over(config: MutableMapping[str, Any]) -> Policy:
    """Return the configuration's policy, and leave it under Lowtide's key; doing it again changes nothing."""
    policy = policy_of(config)
    if config.get(KEY) is None:
        taken = {name: value for name in _WORDS if (value := config.pop(name, None))}
        config[KEY] = str(policy)
        logger.info("axolotl's %s: taken over by Lowtide, with policy %s", ", ".join(taken), policy.describe())
        if "attention" in policy.keep and not _saves_windows(taken):
            logger.info("keep=attention keeps attention over sliding windows, too, which axolotl would recompute")
    return policy


def _saves_windows(words: Mapping[str, Any]) -> bool:
    selective = words.get("selective_checkpointing")
    return isinstance(selective, Mapping) and bool(selective.get("save_sliding_window"))


def policy_of(config: Mapping[str, Any]) -> Policy:
    """Return the policy under Lowtide's key, or what axolotl's words mean. Both at once are refused."""
    policy = _from_words(config) if config.get(KEY) is None else _from_key(config)
    for name, reason in _REFUSED.items():
        if policy != Policy() and _look_up(config, name):
            raise InvalidValueError(f"axolotl's {name} cannot be honoured beside policy {policy}: {reason}")
    return policy


def _from_key(config: Mapping[str, Any]) -> Policy:
    policy = Policy.parse(config[KEY])
    words = [name for name in _WORDS if config.get(name)]
    if words and policy != Policy():  # with policy none, axolotl may do as it likes
        raise InvalidValueError(
            f"axolotl's configuration asks for '{KEY}: {policy}' and for {', '.join(words)}: leave one of them out"
        )
    return policy


def _look_up(config: Mapping[str, Any], path: str) -> Any:
    section, _, name = path.rpartition(".")
    return ((config.get(section) or {}) if section else config).get(name)


def _from_words(config: Mapping[str, Any]) -> Policy:
    checkpointing, offloading = _checkpointing_and_offloading(config)
    fields: dict[str, Any] = {}
    if checkpointing:
        fields["gradient_checkpointing"] = True
        fields["gradient_checkpointing_kwargs"] = config.get("gradient_checkpointing_kwargs") or {}
    if offloading:
        fields["activation_offloading"] = offloading
    if (selective := config.get("selective_checkpointing")) not in (None, False):
        fields["keep"] = _kept(selective, checkpointing, offloading)
    fields |= {name: config[name] for name in ("tiled_mlp", "tiled_mlp_num_shards") if config.get(name)}
    policy = Policy.parse(fields)
    if policy == Policy():
        raise InvalidValueError(
            "axolotl's configuration lists Lowtide's plugin and asks for nothing: add a policy, such as "
            f"'{KEY}: recompute+offload+tile', or remove the plugin"
        )
    if offloading is True and config.get("adapter"):
        # this is what axolotl means: with an adapter, everything saved is offloaded and nothing is recomputed
        return dataclasses.replace(policy, recompute=False)
    return policy


def _checkpointing_and_offloading(config: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return `gradient_checkpointing` and `activation_offloading`, with older spellings in today's words."""
    checkpointing, offloading = config.get("gradient_checkpointing"), config.get("activation_offloading")
    older: dict[str, Any] = {"offload": True, "offload_disk": "disk"}
    if isinstance(checkpointing, str):
        if checkpointing not in older:
            raise InvalidValueError(
                f"unknown value of axolotl's gradient_checkpointing: {checkpointing}. Write true, or '{KEY}: recompute'"
            )
        offloading = older[checkpointing]
    if offloading == "disk":
        raise InvalidValueError(
            "axolotl's activation_offloading: disk names no directory (and axolotl's own goes to host memory). Write "
            f"'{KEY}: recompute+offload(disk=/scratch)', with a directory on a local disk"
        )
    if offloading and not checkpointing:
        raise InvalidValueError(
            f"axolotl's activation_offloading: {offloading} needs gradient_checkpointing: true. To offload without "
            f"recompute, write '{KEY}: offload'"
        )
    return bool(checkpointing), offloading


_SELECTIVE = "axolotl's selective_checkpointing"


def _kept(selective: Any, checkpointing: bool, offloading: Any) -> tuple[str, ...]:
    """Return what `selective_checkpointing` keeps: true, or a section with `save`, `offload` and more."""
    settings = {} if selective is True else selective
    if not isinstance(settings, Mapping):
        raise InvalidValueError(f"{_SELECTIVE} must be true, false or a section, got {selective!r}")
    for name, value in settings.items():
        if name not in _SELECTIVE_SETTINGS:
            raise InvalidValueError(unknown(name, _SELECTIVE_SETTINGS, f"setting of {_SELECTIVE}"))
        if name in ("offload", "save_sliding_window") and not isinstance(value, bool | None):
            raise InvalidValueError(f"{_SELECTIVE}.{name} must be true or false, got {value!r}")
    if not checkpointing:
        raise InvalidValueError(f"{_SELECTIVE} needs gradient_checkpointing: true")
    words = _saved(settings.get("save"))
    policy = str(Policy(recompute=True, keep=words))
    if settings.get("recompute_layer_types") is not None or settings.get("save_sliding_window") is False:
        raise InvalidValueError(
            f"{_SELECTIVE}: save_sliding_window: false and recompute_layer_types cannot be honoured, because a policy "
            f"tells layers by name. Leave them out, or write '{KEY}: \"{policy}; *.layers.0: recompute\"', with a rule "
            "for each layer that shall keep nothing"
        )
    if bool(settings.get("offload")) != bool(offloading) or offloading not in (None, False, "hidden_states"):
        raise InvalidValueError(
            f"{_SELECTIVE}: what is kept leaves the device with the layers' inputs, or both stay. For both on the "
            "host, set selective_checkpointing.offload: true and activation_offloading: hidden_states, or write "
            f"'{KEY}: {policy}+offload'; for both on the device, set neither"
        )
    return words


_SELECTIVE_SETTINGS = ("save", "offload", "save_sliding_window", "recompute_layer_types")


def _saved(names: Any) -> tuple[str, ...]:
    """Return what the list `save` names. axolotl takes parts of names, too; they are refused."""
    if not isinstance(names, list | tuple | None):
        raise InvalidValueError(f"{_SELECTIVE}.save must be a list, like [attention], got {names!r}")
    for name in names or ():
        if name != "attention" and (not isinstance(name, str) or OPERATOR.fullmatch(name) is None):
            raise InvalidValueError(
                f"{_SELECTIVE}.save: {name!r} is not the whole name of an operator. Write attention, or names like "
                "aten::mm"
            )
    return tuple(names or ("attention",))
