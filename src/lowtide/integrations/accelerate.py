"""accelerate: `prepare` applies a policy and hands everything to the accelerator.

    model, optimizer, loader = prepare(accelerator, "recompute+tile", model, optimizer, loader)

It is `lowtide.apply(model, policy)` followed by `accelerator.prepare(model, ...)`, with one check between them: an FSDP
plugin that checkpoints activations itself would recompute every region twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lowtide
from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from lowtide.policy import Policy


def prepare(
    accelerator: Accelerator, policy: Policy | str | Mapping[str, Any], model: nn.Module, *others: Any, **options: Any
) -> Any:
    """Apply `policy` to `model`, and return what `accelerator.prepare` makes of the model and `others`."""
    check_fsdp(getattr(accelerator.state, "fsdp_plugin", None))
    lowtide.apply(model, policy, **options)
    return accelerator.prepare(model, *others)


def check_fsdp(settings: Any) -> None:
    """Refuse FSDP's own checkpointing, in accelerate's plugin or in a trainer's dictionary."""
    for name in ("activation_checkpointing", "activation_checkpointing_offload"):
        if settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, False):
            raise InvalidValueError(
                f"FSDP's settings have {name}=True: every region would be recomputed twice, and without its "
                "random state. Switch it off (fsdp_activation_checkpointing: false) and leave it to Lowtide's policy"
            )
