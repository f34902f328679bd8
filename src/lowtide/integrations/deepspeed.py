"""DeepSpeed: `initialize` applies a policy and hands the model to DeepSpeed's engine.

    engine, optimizer, *_ = initialize(model, "recompute+tile", config=config, optimizer=optimizer)

It is `lowtide.apply(model, policy)` followed by `deepspeed.initialize(model=model, ...)`. The
`activation_checkpointing` section of DeepSpeed's configuration acts only on models that call DeepSpeed's own checkpoint
function, and on all other models it silently does nothing; here it is honoured as a policy, or refused.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lowtide
from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from lowtide.policy import Policy
    from lowtide.regions import Selector


def initialize(
    model: nn.Module,
    policy: Policy | str | Mapping[str, Any] | None = None,
    *,
    config: Mapping[str, Any] | str | Path,
    regions: Sequence[Selector] | None = None,
    strict: bool = True,
    **options: Any,
) -> Any:
    """Apply a policy, the one given or the configuration's, and return what `deepspeed.initialize` returns.

    `regions` and `strict` are passed to `lowtide.apply`; all other options to DeepSpeed.
    """
    deepspeed = importlib.import_module("deepspeed")
    settings = dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    lowtide.apply(model, policy_of(settings, policy), regions=regions, strict=strict)
    settings.pop("activation_checkpointing", None)
    return deepspeed.initialize(model=model, config=settings, **options)


def policy_of(settings: Mapping[str, Any], policy: Policy | str | Mapping[str, Any] | None) -> Policy:
    """Return the policy that is given, or what `activation_checkpointing` asks for. Both at once are refused."""
    section = settings.get("activation_checkpointing") or {}
    asks = [name for name, value in section.items() if value]
    if policy is not None and asks:
        raise InvalidValueError(
            f"DeepSpeed's configuration asks for activation_checkpointing ({', '.join(asks)}) and a policy is given: "
            "leave one of them out"
        )
    if policy is not None:
        return lowtide.Policy.parse(policy)
    if "activation_checkpointing" not in settings:
        raise InvalidValueError(
            "no policy: give one, or an activation_checkpointing section in DeepSpeed's configuration"
        )
    return lowtide.Policy.parse({"activation_checkpointing": section})
