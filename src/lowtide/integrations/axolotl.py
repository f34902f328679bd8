"""axolotl: a plugin, and one key of the configuration.

    plugins:
      - lowtide.integrations.axolotl.LowtidePlugin
    lowtide: recompute+offload+tile

The configuration is read when the plugin is registered, before axolotl validates it: a request that cannot be honoured
stops there, before anything is loaded. The policy is put on the trainer's model as a `LowtideCallback`, not on each
model that axolotl loads: reference models and inference stay untouched, adapters and wrappers are in place by then, the
figures reach every reporter, and what is saved at the end is a plain model.

axolotl's list of plugins lives as long as the process, so each hook checks whether its configuration asks for Lowtide.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from lowtide.integrations.axolotl_config import KEY, take_over
from lowtide.integrations.transformers import LowtideCallback, attach

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from torch import nn
    from transformers import Trainer


class LowtideArgs(BaseModel):
    """The schema of Lowtide's key: axolotl drops keys that no schema names."""

    lowtide: str | dict[str, Any] | None = None


class LowtidePlugin(BasePlugin):  # type: ignore[misc]  # axolotl is not there when types are checked
    """Applies the configuration's policy for as long as axolotl trains."""

    def __init__(self) -> None:
        super().__init__()
        self.callback: LowtideCallback | None = None
        """The callback of the newest trainer, whose `applied` has the report."""

    def get_input_args(self) -> str:
        return f"{LowtideArgs.__module__}.{LowtideArgs.__qualname__}"

    def register(self, cfg: MutableMapping[str, Any]) -> None:
        if f"{type(self).__module__}.{type(self).__qualname__}" in (cfg.get("plugins") or ()):
            take_over(cfg)

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: Trainer) -> None:
        self.callback = None if cfg.get(KEY) is None else attach(trainer, cfg[KEY])

    def post_train(self, cfg: Mapping[str, Any], model: nn.Module) -> None:
        del model
        if self.callback is not None and self.callback.applied is None:
            warnings.warn(
                f"lowtide: axolotl's trainer never called on_train_begin, so '{KEY}: {cfg[KEY]}' had no effect: use a "
                "trainer that runs its callbacks, or lowtide.apply(model, policy)",
                stacklevel=2,
            )
