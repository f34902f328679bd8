"""Weights that other ranks hold parts of.

FSDP2 units inside a tiled function stay unsharded while the tiles run, forward and backward.

Else every tile would gather every weight again. It also makes the collectives of a call the same whatever the number of
its tiles, so that ranks with sequences of different lengths meet. Units around it need no care.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lowtide.tiling.callee import is_in_pieces, is_partitioned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.tiling.callee import Callee


@contextlib.contextmanager
def gathered(callee: Callee) -> Iterator[None]:
    """All weights are whole inside, whether or not anything is called: those of FSDP2 units, and ZeRO-3's.

    What ZeRO-3 holds whole for a module that runs right now stays with it: all of them if the module is one of its
    leaves, as mixtures of experts are.
    """
    sharded = [unit for unit in callee.units() if not all(group.is_unsharded for group in _groups([unit]))]
    with contextlib.ExitStack() as stack:
        for unit in sharded:
            unit.unshard()
            stack.callback(unit.reshard)
        weights = [] if callee.module is None else callee.module.parameters()
        if in_pieces := [weight for weight in weights if is_in_pieces(weight)]:
            deepspeed = importlib.import_module("deepspeed")
            stack.enter_context(deepspeed.zero.GatheredParameters(in_pieces))
        yield


def most_of_all_ranks(number: int, callee: Callee, device: torch.device) -> int:
    """The largest number that a rank brings along, of those that share the weights."""
    group = next(weight.ds_process_group for weight in callee.module.parameters() if is_partitioned(weight))  # type: ignore[union-attr]
    agreed = torch.tensor(number, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
    return int(agreed)


@contextlib.contextmanager
def unsharded_in_forward(units: list[Any]) -> Iterator[None]:
    """Units that are gathered inside stay so until the end."""
    groups = _groups(units)
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
        self._groups = _groups(units)

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


def _groups(units: list[Any]) -> list[Any]:
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
