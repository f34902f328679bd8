"""accelerate: `prepare` applies a policy and hands everything to the accelerator.

    model, optimizer, loader = prepare(accelerator, "recompute+tile", model, optimizer, loader)

It is `lowtide.apply(model, policy)` followed by `accelerator.prepare(model, ...)`, with one check between them: an FSDP
plugin that checkpoints activations itself would recompute every block twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lowtide
from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelerate import Accelerator
    from torch import nn

    from lowtide.policy import Policy


def prepare(
    accelerator: Accelerator, policy: Policy | str | Mapping[str, Any], model: nn.Module, *others: Any, **options: Any
) -> Any:
    """The model under a policy, and the others, as `accelerator.prepare` returns them."""
    check_plugin(accelerator.state.fsdp_plugin if hasattr(accelerator.state, "fsdp_plugin") else None)
    lowtide.apply(model, policy, **options)
    return accelerator.prepare(model, *others)


def check_plugin(plugin: Any) -> None:
    """Refuse an FSDP plugin whose own checkpointing is on."""
    for setting in ("activation_checkpointing", "activation_checkpointing_offload"):
        if getattr(plugin, setting, False):
            raise InvalidValueError(
                f"accelerate's FSDP plugin has {setting}=True: every block would be recomputed twice, and without its "
                "random state. Switch it off (fsdp_activation_checkpointing: false) and leave it to Lowtide's policy"
            )
