"""FSDP2 units inside a tiled function stay unsharded while the tiles run, forward and backward.

Else every tile would gather every weight again. It also makes the collectives of a call the same whatever the number of
its tiles, so that ranks with sequences of different lengths meet. Units around it need no care.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def inner_units(function: Callable[..., Any]) -> list[Any]:
    """The FSDP2 units that gather their weights when a function is called.

    A module's own hooks belong to that if it is called itself, and not if its `forward` is, from within those hooks.
    """
    module = module_of(function)
    if module is None or "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    called = [inner for inner in module.modules() if inner is not module or function is module]
    return [inner for inner in called if isinstance(inner, FSDPModule)]


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module behind a callable: itself, or the one whose method it is."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


@contextlib.contextmanager
def gathered(units: list[Any]) -> Iterator[None]:
    """The units' weights are whole inside, whether or not anything is called."""
    sharded = [unit for unit in units if not _is_unsharded(unit)]
    for unit in sharded:
        unit.unshard()
    try:
        yield
    finally:
        for unit in sharded:
            unit.reshard()


def _is_unsharded(unit: Any) -> bool:
    return all(group.is_unsharded for group in unit._get_fsdp_state()._fsdp_param_groups)


@contextlib.contextmanager
def unsharded_in_forward(units: list[Any]) -> Iterator[None]:
    """Units that are gathered inside stay so until the end."""
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
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


class UnshardedInBackward:
    """The same for backward, which has no block of code around it: begun with the first tile, ended with the last."""

    def __init__(self, units: list[Any]) -> None:
        self._groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        self._before: list[bool] | None = None

    def begin(self) -> None:
        if self._before is None:
            self._before = [group.reshard_after_backward for group in self._groups]
            for group in self._groups:
                group.reshard_after_backward = False

    def end(self) -> None:
        before, self._before = self._before, None
        for group, reshards in zip(self._groups, before or [], strict=False):
            group.reshard_after_backward = reshards
            if reshards:
                group.reshard()
