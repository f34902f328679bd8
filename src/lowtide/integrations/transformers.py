"""transformers' `Trainer`, and everything built on it, such as TRL's `SFTTrainer`.

    trainer = SFTTrainer(model, ..., callbacks=[LowtideCallback("recompute+tile(mlp)")])

or, so that the figures reach every reporter (W&B, TensorBoard), which are callbacks themselves and come first:

    trainer = SFTTrainer(model, ...)
    attach(trainer, "recompute+tile(mlp)")

`lowtide.apply(model, policy)` before the trainer is made works as well; the callback does it when training begins, logs
what happens, and undoes it at the end. With `gradient_checkpointing=True` in the trainer's arguments, the model's own
checkpointing is switched off while the policy is in force, and a warning says so. That goes for TRL's selective mode,
too: what it means is `recompute(keep=attention)`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

import lowtide
from lowtide.applying.validate import refuse_tiled_loss, validate
from lowtide.errors import InvalidValueError
from lowtide.integrations.accelerate import check_fsdp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from lowtide.applying import Applied
    from lowtide.policy import Policy
    from lowtide.regions import Selector


class LowtideCallback(TrainerCallback):
    """Applies a policy for as long as a trainer trains."""

    def __init__(
        self,
        policy: Policy | str | Mapping[str, Any] = "recompute+offload",
        *,
        regions: Sequence[Selector] | None = None,
        strict: bool = True,
    ) -> None:
        self.policy = lowtide.Policy.parse(policy)
        self.applied: Applied | None = None
        self._regions = regions
        self._strict = strict

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the policy. The model is wrapped already if it will be, and only instances of its regions change."""
        del state, control
        check_fsdp(args.fsdp_config)
        _check_own_loss(args, self.policy)
        self._warn_about_selective(args)
        self.applied = lowtide.apply(kwargs["model"], self.policy, regions=self._regions, strict=self._strict)

    def _warn_about_selective(self, args: TrainingArguments) -> None:
        """Say that TRL's selective mode is switched off, if the policy has nothing in its place."""
        settings = args.gradient_checkpointing_kwargs
        is_selective = isinstance(settings, dict) and settings.get("selective")
        keeps = any(policy.keep for policy in (self.policy, *(rule for _, rule in self.policy.overrides)))
        if is_selective and self.policy.recompute and not keeps:
            warnings.warn(
                f"lowtide: gradient_checkpointing_kwargs={{'selective': True}} is switched off with the model's own "
                f"checkpointing, and the policy {self.policy.describe()} recomputes attention: write "
                "recompute(keep=attention) to keep it",
                stacklevel=2,
            )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add what happened so far to the trainer's own record."""
        del args, control
        logs = kwargs.get("logs")
        if self.applied is None or logs is None or "loss" not in logs:
            return
        figures = {f"lowtide/{name}": value for name, value in self.applied.report().logged_figures().items()}
        logs.update(figures)
        state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        del args, state, control, kwargs
        if self.applied is not None:
            self.applied.remove()


def attach(
    trainer: Trainer, policy: Policy | str | Mapping[str, Any] = "recompute+offload", **options: Any
) -> LowtideCallback:
    """Add a `LowtideCallback` ahead of the trainer's reporters, so that they see its figures.

    A policy that this trainer's model cannot have is refused at once; the model changes when training begins.
    """
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(callback, LowtideCallback) for callback in callbacks):
        raise InvalidValueError("this trainer already has a LowtideCallback: remove it, or change its policy")
    check_fsdp(getattr(trainer.accelerator.state, "fsdp_plugin", None))
    callback = LowtideCallback(policy, **options)
    _check_own_loss(trainer.args, callback.policy)
    if trainer.model is not None:
        validate(trainer.model, callback.policy, options.get("regions"))
    callbacks.insert(0, callback)
    return callback


def _check_own_loss(args: TrainingArguments, policy: Policy) -> None:
    """Refuse `tile(loss)` for TRL's `DistillationTrainer`.

    It leaves the model's forward as it is, and calls the model's backbone beside it. So its arguments alone show it.
    """
    kinds = {kind.__name__ for kind in type(args).__mro__ if kind.__module__.partition(".")[0] == "trl"}
    if "loss" in policy.tile and "DistillationConfig" in kinds:
        refuse_tiled_loss(
            policy,
            "TRL's DistillationTrainer computes the divergence from hidden states and the weights of both heads, in "
            "tiles of its own, and never makes logits",
        )
