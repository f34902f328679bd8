"""The set-ups that an audit judges: how a model's checkpointing is switched on, and how it is switched off again.

A set-up is a user's `configure` function, one of the modes of transformers' own flag, or nothing at all: the model is
audited as it is.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide._torch import children_of
from lowtide.errors import CannotAuditError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

AS_IT_IS = "as it is"
CONFIGURED = "configured"
PLAIN = "plain model"
"""The mode of what is said about the model itself, whatever the set-up is."""
TRANSFORMERS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
}
"""Modes of transformers' `gradient_checkpointing_enable`, with the keywords that each passes to it."""
MODES = ("default", "reentrant")
"""The modes that are judged unless the caller chooses."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to train a model."""

    name: str
    configure: Callable[[nn.Module], Any] | None
    """None: the model is judged as it is."""
    undo: Callable[[nn.Module, Any], None] | None = None

    def install(self, model: nn.Module) -> Installed:
        """Set `model` up. If `configure` returns a module, as wrapping functions do, that module is trained."""
        token = self.configure(model) if self.configure is not None else None
        return Installed(self, token if isinstance(token, nn.Module) else model, token)


@dataclasses.dataclass(frozen=True)
class Installed:
    """A set-up in force on a model."""

    setup: Setup
    model: nn.Module
    token: Any
    """What `configure` returned; an object with `remove()` can undo the set-up."""

    @property
    def can_be_undone(self) -> bool:
        return self.setup.undo is not None or hasattr(self.token, "remove")

    def undo(self) -> None:
        if self.setup.undo is not None:
            self.setup.undo(self.model, self.token)
        else:
            self.token.remove()


def setups_for(
    model: nn.Module, configure: Callable[[nn.Module], Any] | None, modes: Sequence[str] | None
) -> list[Setup]:
    """Choose what to judge: `configure`, the given modes, or by default what suits the model.

    A transformers model on which nothing is switched on is judged in both modes of its own flag, any other as it is.
    """
    if configure is not None:
        if modes is not None:
            raise CannotAuditError("pass configure= or modes=, not both: modes are settings of transformers' own flag")
        return [Setup(CONFIGURED, configure)]
    if modes is None:
        is_plain = not (is_checkpointing(model) or _is_wrapped(model) or _has_policy(model))
        modes = MODES if _offers_checkpointing(model) and is_plain else (AS_IT_IS,)
    return [_setup(model, mode) for mode in modes]


def _setup(model: nn.Module, mode: str) -> Setup:
    if mode == AS_IT_IS:
        return Setup(AS_IT_IS, None)
    if mode not in TRANSFORMERS:
        raise CannotAuditError(f"unknown mode {mode!r}: choose from {', '.join([*TRANSFORMERS, AS_IT_IS])}")
    if not _offers_checkpointing(model):
        raise CannotAuditError(
            f"{type(model).__name__} does not support gradient checkpointing, so it has no mode {mode!r}: "
            "pass configure=, a function that sets the model up"
        )

    def configure(model: nn.Module) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=TRANSFORMERS[mode])  # type: ignore[operator]

    return Setup(mode, configure, lambda model, _: disable_checkpointing(model))


def disable_checkpointing(model: nn.Module) -> None:
    """Switch off the checkpointing that a model's own flag controls."""
    if _offers_checkpointing(model) and is_checkpointing(model):
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]


def is_checkpointing(model: nn.Module) -> bool:
    """Return whether the flag of any module is on."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _offers_checkpointing(model: nn.Module) -> bool:
    return callable(getattr(model, "gradient_checkpointing_enable", None)) and bool(
        getattr(model, "supports_gradient_checkpointing", False)
    )


def _is_wrapped(model: nn.Module) -> bool:
    """Return whether blocks lie in torch's checkpoint wrappers: then somebody has set the model up."""
    return any("_checkpoint_wrapped_module" in children_of(module) for module in model.modules())


def _has_policy(model: nn.Module) -> bool:
    """Return whether a policy is in force: an object replaces a module's forward and says `is_activation_policy`.

    Lowtide's objects do, and those in a deep copy do not. It is a protocol, because the audit imports no engine.
    """
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return any(getattr(forward, "is_activation_policy", False) is True for forward in forwards)
