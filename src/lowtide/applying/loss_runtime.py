"""What the seams of a head and of its model do: make the loss in tiles, behind the model's own code.

In a training call with labels, the head returns `DeferredLogits`. When the model's code asks for the cross entropy of
them, the loss is made. A head whose weights are gathered in hooks (FSDP2, ZeRO-3) is called once more for that.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import outside_graph
from lowtide.errors import InvalidValueError
from lowtide.losses.deferred import DeferredLogits
from lowtide.losses.head_loss import count_classes, head_loss
from lowtide.tiling.collectives import is_distributed
from lowtide.tiling.tiled_function import TiledFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from lowtide.counters import TileLedger
    from lowtide.losses.deferred import LossRequest

_REQUEST = "lowtide_loss_request"
"""The keyword under which a head that is called once more gets the loss to make."""


class ModelRuntime:
    """Tells the head whether its model was called with labels."""

    def __init__(self) -> None:
        self.has_labels = False

    def is_active(self, module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled()

    def run(
        self, _module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the model's forward, and know meanwhile whether it has labels.

        Under sequence parallelism a rank's part of the labels comes shifted, and often alone: the loss is made outside.
        """
        labels = kwargs.get("labels") if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
        if args and labels is None:
            labels = inspect.signature(forward).bind_partial(*args).arguments.get("labels")
        before, self.has_labels = self.has_labels, labels is not None
        try:
            return forward(*args, **kwargs)
        finally:
            self.has_labels = before


class HeadRuntime:
    """Makes a head return logits that are not computed, and the loss when it is asked for."""

    def __init__(self, model: ModelRuntime, ledger: TileLedger, tokens: int | None) -> None:
        self._model = model
        self._ledger = ledger
        self._tokens = tokens

    def is_active(self, module: nn.Module) -> bool:  # noqa: ARG002  (its model decides)
        return self._model.has_labels

    def run(self, head: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return deferred logits; or the loss itself, if this is the second call of a head that gathers weights."""
        if len(args) != 1:
            return forward(*args, **kwargs)
        (hidden,) = args
        self._refuse_tensor_parallel(head, hidden)
        if _REQUEST in kwargs:
            return head_loss(TiledFunction(forward, head), hidden, kwargs[_REQUEST], self._ledger, self._tokens)

        @outside_graph
        def make_loss(hidden: torch.Tensor, request: LossRequest) -> torch.Tensor:
            return self._make_loss(TiledFunction(forward, head), hidden, request)

        dtype = torch.get_autocast_dtype(hidden.device.type) if _is_autocast(hidden) else hidden.dtype
        return DeferredLogits(hidden, count_classes(head), dtype, make_loss, forward)

    def _refuse_tensor_parallel(self, head: nn.Module, hidden: torch.Tensor) -> None:
        """Refuse a head that is split over ranks. (What FSDP2 shards is gathered by now.)"""
        if any(map(is_distributed, [hidden, *head.parameters()])):
            raise InvalidValueError(
                f"tile(loss): the head {self._ledger.name!r} is split over ranks by tensor parallelism, and a rank's "
                "loss would need the others' logits. Leave tile(loss) out of the policy, or lm_head out of the "
                "tensor-parallel plan"
            )

    def _make_loss(self, tiled: TiledFunction, hidden: torch.Tensor, request: LossRequest) -> torch.Tensor:
        """Make the loss. Hooks of the head have acted already; only those that gather weights must act again."""
        if not tiled.has_fsdp_modules() and not tiled.has_partitioned_weights():
            return head_loss(tiled, hidden, request, self._ledger, self._tokens)
        before, self._model.has_labels = self._model.has_labels, True
        try:
            return tiled.module(hidden, **{_REQUEST: request})  # type: ignore[no-any-return, misc]
        finally:
            self._model.has_labels = before


def _is_autocast(tensor: torch.Tensor) -> bool:
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
