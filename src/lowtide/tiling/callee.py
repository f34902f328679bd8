"""The function that is tiled, and the module whose weights it uses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lowtide.errors import InPlaceError

if TYPE_CHECKING:
    from collections.abc import Callable


class Weight(NamedTuple):
    """A weight as it was in forward, and where a module holds it."""

    held_by: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int


class Callee:
    """A function, with its module if there is one: itself, the one whose method it is, or the one that is given."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        self.function = function
        self.module = owner if module is None and isinstance(owner, nn.Module) else module

    def units(self) -> list[Any]:
        """The FSDP2 units that gather their weights when the function is called.

        The module's own hooks belong to that if it is called itself, and not if its `forward` is, from within them.
        """
        if self.module is None or "torch.distributed.fsdp" not in sys.modules:
            return []
        from torch.distributed.fsdp import FSDPModule

        called = [inner for inner in self.module.modules() if inner is not self.module or self.function is self.module]
        return [inner for inner in called if isinstance(inner, FSDPModule)]

    def units_of_its_own(self) -> bool:
        """Whether the module or a part of it is an FSDP2 unit."""
        return self.module is not None and bool(Callee(self.module).units())

    def weights(self) -> list[Weight]:
        """The weights that are there all the time: not those that units gather, nor those that ZeRO-3 hands out."""
        if self.module is None:
            return []
        elsewhere = {id(inner) for unit in self.units() for inner in unit.modules()}
        return [
            Weight(inner._parameters, name, weight, weight._version)
            for inner in self.module.modules()
            if id(inner) not in elsewhere
            for name, weight in inner._parameters.items()
            if weight is not None and not is_partitioned(weight)
        ]

    def has_partitioned_weights(self) -> bool:
        return self.module is not None and any(is_partitioned(weight) for weight in self.module.parameters())


def is_partitioned(weight: torch.Tensor) -> bool:
    """DeepSpeed ZeRO-3 marks the weights that it keeps in pieces and gathers in hooks."""
    return hasattr(weight, "ds_id")


def is_in_pieces(weight: torch.Tensor) -> bool:
    """Whether ZeRO-3 holds it in pieces right now: it has not gathered it for a module that runs."""
    return is_partitioned(weight) and not weight.ds_active_sub_modules  # type: ignore[attr-defined]


def check_unchanged(weights: list[Weight], name: str) -> None:
    """What autograd does for saved tensors: a weight that was changed since forward would give a wrong gradient."""
    for weight in weights:
        if weight.tensor._version != weight.version:
            raise InPlaceError(
                f"{name}: the weight {weight.name!r} was modified by an inplace operation between forward and backward "
                f"(version {weight.version}, now {weight.tensor._version}): change weights after backward"
            )
