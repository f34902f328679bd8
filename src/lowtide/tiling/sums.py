"""Weight gradients are summed over tiles in float32.

Autograd sums what several uses of a weight contribute in the weight's own type: with bfloat16 and 256 tiles, the sum
has lost most of what single precision would keep. So each tile uses the weight through an alias, whose gradient is
turned into float32 and flows into one stand-in per weight. The stand-in has the weight's shape and no memory; autograd
sums there, and casts once, on the way to the weight. The weight's own hooks fire once, as ever.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lowtide.errors import InvalidValueError
from lowtide.tiling.sharded import inner_units, module_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Accumulate = Literal["auto", "float32", "parameter"]

FLOAT32_BYTES = 3 * 1024**3
"""`auto` sums in float32 up to this many bytes of sums: the experts of one layer can take tens of gigabytes."""


class _StandIn(torch.autograd.Function):
    """weight -> a float32 tensor of its shape without memory."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return torch.empty((), dtype=torch.float32, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].to(ctx.dtype)


class _Alias(torch.autograd.Function):
    """(stand-in, weight) -> the weight, with its gradient flowing to the stand-in."""

    @staticmethod
    def forward(_ctx: Any, _stand_in: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].float(), None


class Sums:
    """The stand-ins of one call's weights."""

    def __init__(self, function: Callable[..., Any], accumulate: Accumulate) -> None:
        self._module = module_of(function)
        weights = _weights(function, accumulate)
        self._stand_ins = {weight: _StandIn.apply(weight) for weight in weights}  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """The module sees aliases of its weights inside."""
        if not self._stand_ins:
            yield
            return
        aliases = {weight: _Alias.apply(stand_in, weight) for weight, stand_in in self._stand_ins.items()}  # type: ignore[no-untyped-call]
        places = [
            (inner._parameters, name, weight)
            for inner in self._module.modules()  # type: ignore[union-attr]  # stand-ins come from it
            for name, weight in inner._parameters.items()
            if weight in aliases
        ]
        try:
            for parameters, name, weight in places:
                parameters[name] = aliases[weight]
            yield
        finally:
            for parameters, name, weight in places:
                parameters[name] = weight


def _weights(function: Callable[..., Any], accumulate: Accumulate) -> list[nn.Parameter]:
    if accumulate not in ("auto", "float32", "parameter"):
        raise InvalidValueError(f"accumulate must be 'auto', 'float32' or 'parameter', got {accumulate!r}")
    module = module_of(function)
    if module is None:
        if accumulate == "float32":
            raise InvalidValueError(
                "accumulate='float32' needs a module, whose weights are known; a function's are not"
            )
        return []
    if accumulate == "parameter":
        return []
    elsewhere = {weight for unit in inner_units(function) for weight in unit.parameters()}
    weights = [weight for weight in module.parameters() if weight not in elsewhere and _can_be_summed(weight)]
    is_too_much = 4 * sum(weight.numel() for weight in weights) > FLOAT32_BYTES
    return [] if accumulate == "auto" and is_too_much else weights


def _can_be_summed(weight: nn.Parameter) -> bool:
    """A trainable low-precision weight that is a plain tensor; ZeRO-3 hands its own out piece by piece."""
    is_low = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.requires_grad and is_low and type(weight) is nn.Parameter and not hasattr(weight, "ds_id")
