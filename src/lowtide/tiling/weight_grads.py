"""Weight gradients are summed over tiles in float32, and arrive in an order that tokens have no say in.

Autograd sums what several uses of a weight contribute in the weight's own type: with bfloat16 and 256 tiles, the sum
has lost most of what single precision would keep. So each tile uses the weight through an alias, whose gradient is
turned into float32 and flows into one stand-in per weight. The stand-in has the weight's shape and no memory; autograd
sums there, and casts once, on the way to the weight. The weight's own hooks fire once, as ever.

A weight of an expert is used by the tiles that have a token for it, and its gradient would be complete when the last of
them is through: on each rank at another time. ZeRO-1 and -2 reduce gradients in the order in which they come, so one
expert's would be added to another's. Autograd takes the youngest node first, and stand-ins are older than all tiles:
whatever tiles use, stand-ins come after them, in one order. So such a weight has one, too, in its own type: a view.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.tiling.tiled_function import TiledFunction, Weight

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


class WeightGradAccumulator:
    """The stand-ins of one call's weights."""

    def __init__(self, tiled: TiledFunction, accumulate: Accumulate) -> None:
        places = [place for place in tiled.weights() if _can_have_stand_in(place.tensor)]
        summed = _summed_in_float32(tiled, places, accumulate)
        skipped = _that_tiles_may_skip(tiled)
        self._places = [place for place in places if place.tensor in summed | skipped]
        self._stand_ins = {
            weight: _StandIn.apply(weight) if weight in summed else weight.view_as(weight)  # type: ignore[no-untyped-call]
            for weight in dict.fromkeys(place.tensor for place in self._places)
        }
        self._summed = summed

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """The module sees aliases of its weights inside."""
        aliases = {
            weight: _Alias.apply(stand_in, weight) if weight in self._summed else stand_in  # type: ignore[no-untyped-call]
            for weight, stand_in in self._stand_ins.items()
        }
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


def _can_have_stand_in(weight: torch.Tensor) -> bool:
    """A trainable weight that is a plain tensor."""
    return weight.requires_grad and type(weight) is nn.Parameter


def _summed_in_float32(tiled: TiledFunction, places: list[Weight], accumulate: Accumulate) -> set[torch.Tensor]:
    """The weights of low precision, as far as the setting allows."""
    if accumulate not in ("auto", "float32", "parameter"):
        raise InvalidValueError(f"accumulate must be 'auto', 'float32' or 'parameter', got {accumulate!r}")
    if tiled.module is None and accumulate == "float32":
        raise InvalidValueError("accumulate='float32' needs a module, whose weights are known; a function's are not")
    if accumulate == "parameter":
        return set()
    low = {place.tensor for place in places if place.tensor.dtype in (torch.bfloat16, torch.float16)}
    is_too_much = 4 * sum(weight.numel() for weight in low) > FLOAT32_BYTES
    return set() if accumulate == "auto" and is_too_much else low


def _that_tiles_may_skip(tiled: TiledFunction) -> set[torch.Tensor]:
    """The weights of modules in a list or a dictionary, of which a forward may call some and not others: experts."""
    inner = [] if tiled.module is None else tiled.module.modules()
    lists = [module for module in inner if isinstance(module, nn.ModuleList | nn.ModuleDict)]
    return {weight for module in lists for weight in module.parameters()}
