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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.tiling.callee import Callee, Weight

Accumulate = Literal["auto", "float32", "parameter"]

FLOAT32_BYTES = 3 * 1024**3
"""`auto` sums in float32 up to this many bytes of sums: the experts of one layer can take tens of gigabytes."""


class _StandIn(torch.autograd.Function):
    """weight -> a float32 tensor of its shape without memory."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)

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

    def __init__(self, callee: Callee, accumulate: Accumulate) -> None:
        self._places = _places(callee, accumulate)
        weights = dict.fromkeys(place.tensor for place in self._places)
        self._stand_ins = {weight: _StandIn.apply(weight) for weight in weights}  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """The module sees aliases of its weights inside."""
        aliases = {weight: _Alias.apply(stand_in, weight) for weight, stand_in in self._stand_ins.items()}  # type: ignore[no-untyped-call]
        with swapped_in(self._places, [aliases[place.tensor] for place in self._places]):
            yield


@contextlib.contextmanager
def swapped_in(places: list[Weight], tensors: list[torch.Tensor]) -> Iterator[None]:
    """Other tensors in the places of weights."""
    before = [place.held_by[place.name] for place in places]
    try:
        for place, tensor in zip(places, tensors, strict=True):
            place.held_by[place.name] = tensor
        yield
    finally:
        for place, tensor in zip(places, before, strict=True):
            place.held_by[place.name] = tensor


def _places(callee: Callee, accumulate: Accumulate) -> list[Weight]:
    """Where the weights stand whose gradients are to be summed in float32."""
    if accumulate not in ("auto", "float32", "parameter"):
        raise InvalidValueError(f"accumulate must be 'auto', 'float32' or 'parameter', got {accumulate!r}")
    if callee.module is None and accumulate == "float32":
        raise InvalidValueError("accumulate='float32' needs a module, whose weights are known; a function's are not")
    if accumulate == "parameter":
        return []
    places = [place for place in callee.weights() if _can_be_summed(place.tensor)]
    is_too_much = 4 * sum(weight.numel() for weight in {place.tensor for place in places}) > FLOAT32_BYTES
    return [] if accumulate == "auto" and is_too_much else places


def _can_be_summed(weight: torch.Tensor) -> bool:
    """A trainable low-precision weight that is a plain tensor."""
    is_low = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.requires_grad and is_low and type(weight) is nn.Parameter
