"""Sums weight gradients over tiles in float32, and lets them arrive in an order that does not depend on the tokens.

Autograd sums what several uses of a weight contribute in the weight's own type: with bfloat16 and 256 tiles, the sum
has lost most of what single precision would keep. So each tile uses the weight through an alias, whose gradient is cast
to float32 and flows into one placeholder per weight. The placeholder has the weight's shape and no memory; autograd
sums there, and casts once, on the way to the weight. The weight's own hooks fire once, as ever.

An expert's weight is used only by the tiles that have a token for it, so without placeholders its gradient would be
complete when the last of those is done: at a different time on each rank. ZeRO-1 and -2 reduce gradients in the order
in which they arrive, so one expert's would be added to another's. Autograd runs the youngest node first, and
placeholders are older than all tiles: whichever tiles use a weight, the placeholders come after them, in one order. So
such a weight gets one, too, in its own type: a view.

So do all weights of a function that runs in two passes, whose second pass is through before the first one is run again.
An optimizer that acts in backward would step weights in between that the first pass computes with, or just holds.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lowtide.errors import InvalidValueError
from lowtide.weights import replaced_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.tiling.tiled_function import TiledFunction
    from lowtide.weights import Weight

Accumulate = Literal["auto", "float32", "parameter"]

FLOAT32_BYTES = 3 * 1024**3
"""`auto` sums in float32 up to this many bytes of sums: the experts of one layer can take tens of gigabytes."""


class _Float32Placeholder(torch.autograd.Function):
    """Returns a float32 tensor of the weight's shape without memory; its gradient is cast to the weight's type."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].to(ctx.dtype)


class _Alias(torch.autograd.Function):
    """Returns the weight, with its gradient flowing to the placeholder instead, in float32."""

    @staticmethod
    def forward(_ctx: Any, _placeholder: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].float(), None


class WeightGradAccumulator:
    """Collects the gradients of one call's weights: one placeholder for each weight that needs it, or for `every` one.

    It is made before the tiles run, and before the first of two passes.
    """

    def __init__(self, tiled: TiledFunction, accumulate: Accumulate, *, every: bool = False) -> None:
        weights = [weight for weight in tiled.weights() if _can_have_placeholder(weight.tensor)]
        in_float32 = _summed_in_float32(tiled, weights, accumulate)
        in_turn = {weight.tensor for weight in weights} if every else _weights_tiles_may_skip(tiled)
        self._weights = [weight for weight in weights if weight.tensor in in_float32 | in_turn]
        self._placeholders = {
            tensor: _Float32Placeholder.apply(tensor) if tensor in in_float32 else tensor.view_as(tensor)  # type: ignore[no-untyped-call]
            for tensor in dict.fromkeys(weight.tensor for weight in self._weights)
        }
        self._in_float32 = in_float32

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let the module use aliases of its weights inside, whose gradients flow to the placeholders."""
        aliases = {
            tensor: _Alias.apply(placeholder, tensor) if tensor in self._in_float32 else placeholder  # type: ignore[no-untyped-call]
            for tensor, placeholder in self._placeholders.items()
        }
        with replaced_weights(self._weights, [aliases[weight.tensor] for weight in self._weights]):
            yield


def _can_have_placeholder(weight: torch.Tensor) -> bool:
    """Return whether a weight is trainable and a plain parameter, not a subclass."""
    return weight.requires_grad and type(weight) is nn.Parameter


def _summed_in_float32(tiled: TiledFunction, weights: list[Weight], accumulate: Accumulate) -> set[torch.Tensor]:
    """Return the low-precision weights whose gradients are summed in float32, as the setting allows."""
    if accumulate not in ("auto", "float32", "parameter"):
        raise InvalidValueError(f"accumulate must be 'auto', 'float32' or 'parameter', got {accumulate!r}")
    if tiled.module is None and accumulate == "float32":
        raise InvalidValueError("accumulate='float32' needs a module: the weights of a plain function are not known")
    if accumulate == "parameter":
        return set()
    low = {weight.tensor for weight in weights if weight.tensor.dtype in (torch.bfloat16, torch.float16)}
    is_too_much = 4 * sum(tensor.numel() for tensor in low) > FLOAT32_BYTES
    return set() if accumulate == "auto" and is_too_much else low


def _weights_tiles_may_skip(tiled: TiledFunction) -> set[torch.Tensor]:
    """Return the weights of modules in a list or a dictionary, where a forward may call only some: experts."""
    inner = [] if tiled.module is None else tiled.module.modules()
    lists = [module for module in inner if isinstance(module, nn.ModuleList | nn.ModuleDict)]
    return {weight for module in lists for weight in module.parameters()}
