"""The set-ups that are judged: what is done to a model, and how it is undone."""

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
TRANSFORMERS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
}
"""Modes of `gradient_checkpointing_enable`."""
MODES = ("default", "reentrant")
"""Those that are judged unless told otherwise."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to train a model."""

    name: str
    configure: Callable[[nn.Module], Any] | None
    """None: the model is judged as it is."""
    undo: Callable[[nn.Module, Any], None] | None = None

    def install(self, model: nn.Module) -> Installed:
        token = self.configure(model) if self.configure is not None else None
        return Installed(self, token if isinstance(token, nn.Module) else model, token)


@dataclasses.dataclass(frozen=True)
class Installed:
    """A set-up in force on a model."""

    setup: Setup
    model: nn.Module
    token: Any

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
    """What to judge. By default the model as it is, or both modes of transformers' own flag if nothing is on."""
    if configure is not None:
        if modes is not None:
            raise CannotAuditError("modes are those of transformers' own flag: give them, or configure, not both")
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

    return Setup(mode, configure, lambda model, _: disable(model))


def _offers_checkpointing(model: nn.Module) -> bool:
    return callable(getattr(model, "gradient_checkpointing_enable", None)) and bool(
        getattr(model, "supports_gradient_checkpointing", False)
    )


def is_checkpointing(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _is_wrapped(model: nn.Module) -> bool:
    """Whether blocks lie in torch's checkpoint wrappers: somebody has set the model up."""
    return any("_checkpoint_wrapped_module" in children_of(module) for module in model.modules())


def _has_policy(model: nn.Module) -> bool:
    """Whether an object in the place of a module's forward says that it is a policy's, as Lowtide's do and a copy's do
    not: its attribute `is_activation_policy` is true. A protocol, because the audit imports no engine."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return any(getattr(forward, "is_activation_policy", False) is True for forward in forwards)


def disable(model: nn.Module) -> None:
    """Switch off the checkpointing that a model has by itself."""
    if _offers_checkpointing(model) and is_checkpointing(model):
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
