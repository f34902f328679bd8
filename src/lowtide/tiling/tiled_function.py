"""The function that is tiled, and the module whose weights it uses.

Weights that other ranks hold parts of.

FSDP2 units inside a tiled function stay unsharded while the tiles run, forward and backward.

Else every tile would gather every weight again. It also makes the collectives of a call the same whatever the number of
its tiles, so that ranks with sequences of different lengths meet. Units around it need no care.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lowtide._torch import fsdp_param_groups, parameters_of, version_of
from lowtide.errors import InPlaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Weight(NamedTuple):
    """A weight as it was in forward, and where a module holds it."""

    held_by: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int


class TiledFunction:
    """A function, with its module if there is one: itself, the one whose method it is, or the one that is given."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        self.function = function
        self.module = owner if module is None and isinstance(owner, nn.Module) else module

    def fsdp_modules(self) -> list[Any]:
        """The FSDP2 units that gather their weights when the function is called.

        The module's own hooks belong to that if it is called itself, and not if its `forward` is, from within them.
        """
        if self.module is None or "torch.distributed.fsdp" not in sys.modules:
            return []
        from torch.distributed.fsdp import FSDPModule

        called = [inner for inner in self.module.modules() if inner is not self.module or self.function is self.module]
        return [inner for inner in called if isinstance(inner, FSDPModule)]

    def has_fsdp_modules(self) -> bool:
        """Whether the module or a part of it is an FSDP2 unit."""
        return self.module is not None and bool(TiledFunction(self.module).fsdp_modules())

    def weights(self) -> list[Weight]:
        """The weights that are there all the time: not those that units gather, nor those that ZeRO-3 hands out."""
        if self.module is None:
            return []
        elsewhere = {id(inner) for unit in self.fsdp_modules() for inner in unit.modules()}
        return [
            Weight(parameters_of(inner), name, weight, version_of(weight))
            for inner in self.module.modules()
            if id(inner) not in elsewhere
            for name, weight in parameters_of(inner).items()
            if weight is not None and not is_partitioned(weight)
        ]

    def has_partitioned_weights(self) -> bool:
        return self.module is not None and any(is_partitioned(weight) for weight in self.module.parameters())


def is_partitioned(weight: torch.Tensor) -> bool:
    """DeepSpeed ZeRO-3 marks the weights that it keeps in pieces and gathers in hooks."""
    return hasattr(weight, "ds_id")


def is_zero3_sharded(weight: torch.Tensor) -> bool:
    """Whether ZeRO-3 holds it in pieces right now: it has not gathered it for a module that runs."""
    return is_partitioned(weight) and not weight.ds_active_sub_modules  # type: ignore[attr-defined]


def check_unchanged(weights: list[Weight], name: str) -> None:
    """What autograd does for saved tensors: a weight that was changed since forward would give a wrong gradient."""
    for weight in weights:
        if version_of(weight.tensor) != weight.version:
            raise InPlaceError(
                f"{name}: the weight {weight.name!r} was modified by an inplace operation between forward and backward "
                f"(version {weight.version}, now {version_of(weight.tensor)}): change weights after backward"
            )


@contextlib.contextmanager
def gathered(tiled: TiledFunction) -> Iterator[None]:
    """All weights are whole inside, whether or not anything is called: those of FSDP2 units, and ZeRO-3's.

    What ZeRO-3 holds whole for a module that runs right now stays with it: all of them if the module is one of its
    leaves, as mixtures of experts are.
    """
    sharded = [
        unit for unit in tiled.fsdp_modules() if not all(group.is_unsharded for group in fsdp_param_groups([unit]))
    ]
    with contextlib.ExitStack() as stack:
        for unit in sharded:
            unit.unshard()
            stack.callback(unit.reshard)
        weights = [] if tiled.module is None else tiled.module.parameters()
        if in_pieces := [weight for weight in weights if is_zero3_sharded(weight)]:
            deepspeed = importlib.import_module("deepspeed")
            stack.enter_context(deepspeed.zero.GatheredParameters(in_pieces))
        yield


def most_of_all_ranks(number: int, tiled: TiledFunction, device: torch.device) -> int:
    """The largest number that a rank brings along, of those that share the weights."""
    group = next(weight.ds_process_group for weight in tiled.module.parameters() if is_partitioned(weight))  # type: ignore[union-attr]
    agreed = torch.tensor(number, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
    return int(agreed)


@contextlib.contextmanager
def unsharded_in_forward(units: list[Any]) -> Iterator[None]:
    """Units that are gathered inside stay so until the end."""
    groups = fsdp_param_groups(units)
    _mend(groups)
    before = [group.post_forward_mesh_info for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None  # what `set_reshard_after_forward(False)` sets; it cannot be read back
    try:
        yield
    finally:
        for group, mesh in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh
            if mesh is not None:
                group.reshard()


_BEFORE = "_lowtide_reshards_after_backward"
"""Where a group keeps its own setting while tiles run. It is still there if a backward failed in between."""


class UnshardedInBackward:
    """The same for backward, which has no block of code around it: begun with the first tile, ended with the last."""

    def __init__(self, units: list[Any]) -> None:
        self._groups = fsdp_param_groups(units)

    def begin(self) -> None:
        for group in self._groups:
            if not hasattr(group, _BEFORE):
                setattr(group, _BEFORE, group.reshard_after_backward)
            group.reshard_after_backward = False

    def end(self) -> None:
        _mend(self._groups)


def _mend(groups: list[Any]) -> None:
    """Give groups back their own setting, and shard them if that says so."""
    for group in groups:
        if hasattr(group, _BEFORE):
            group.reshard_after_backward = getattr(group, _BEFORE)
            delattr(group, _BEFORE)
            if group.reshard_after_backward:
                group.reshard()
