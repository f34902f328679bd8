"""The function that is tiled, the module whose weights it uses, and what happens to weights that ranks share.

FSDP2 modules inside a tiled function stay unsharded while the tiles run, in forward and in backward: otherwise every
tile would gather every weight again. It also makes the collectives of a call the same whatever the number of its tiles,
so that ranks with sequences of different lengths stay in step. FSDP2 modules around the function need no care.

DeepSpeed ZeRO-3 gathers its partitioned weights in hooks of the modules that use them; those run for each tile.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import fsdp_param_groups, uncompiled
from lowtide.closures import KNOWN_INPUTS, Reached, reached_by
from lowtide.tiling.collectives import largest_in
from lowtide.weights import Weight, is_partitioned, is_zero3_sharded, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_SETTING = "_lowtide_reshards_after_backward"
"""The attribute that keeps a group's own setting while tiles run. It is still there if a backward failed meanwhile."""


class TiledFunction:
    """A function and its module, if there is one: `module`, the function itself, or the object it is a method of."""

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None = None,
        *,
        takes_index: bool = False,
        is_tried: bool = True,
    ) -> None:
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        self.function = function
        self._takes_index = takes_index
        self.module = owner if module is None and isinstance(owner, nn.Module) else module
        self.is_tried = is_tried
        """Whether a trial has shown that no tile changes a buffer that others read."""

    def run_tile(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function for one tile; with the tile's number first, if it takes that."""
        return self.function(index, *args, **kwargs) if self._takes_index else self.function(*args, **kwargs)

    def fsdp_modules(self) -> list[Any]:
        """Return the FSDP2 modules that gather their weights when the function is called.

        The module itself is among them if it is what is called, and not if its `forward` is called from within its
        hooks.
        """
        if self.module is None or "torch.distributed.fsdp" not in sys.modules:
            return []
        from torch.distributed.fsdp import FSDPModule

        called = [
            inner
            for inner in self.module.modules()
            if inner is not self.module or uncompiled(self.function) is self.module
        ]
        return [inner for inner in called if isinstance(inner, FSDPModule)]

    def has_fsdp_modules(self) -> bool:
        """Return whether the module or a part of it is an FSDP2 module."""
        return self.module is not None and bool(TiledFunction(self.module).fsdp_modules())

    def reached(self, args: Iterable[Any]) -> Reached:
        """Return the modules and the places that a call uses: its module, or what its closure refers to."""
        others = [value for value in args if type(value) not in KNOWN_INPUTS]
        if self.module is not None and not others:
            return Reached([self.module], [])
        found = reached_by(uncompiled(self.function) if self.module is None else None, others)
        own = [] if self.module is None else [self.module]
        return Reached([*dict.fromkeys((*own, *found.modules))], found.places)

    def weights(self) -> list[Weight]:
        """Return the weights that are always there: not those that FSDP or ZeRO-3 gather."""
        return [] if self.module is None else weights_of(self.module, called=self.function is self.module)

    def has_partitioned_weights(self) -> bool:
        return self.module is not None and any(is_partitioned(weight) for weight in self.module.parameters())


@contextlib.contextmanager
def gathered(tiled: TiledFunction) -> Iterator[None]:
    """Gather all weights inside, FSDP2's and ZeRO-3's, whether or not anything is called.

    What ZeRO-3 has gathered for a module that runs right now is left to it: all weights, if the module is one of its
    leaves, as mixtures of experts are.
    """
    sharded = [
        module for module in tiled.fsdp_modules() if not all(g.is_unsharded for g in fsdp_param_groups([module]))
    ]
    with contextlib.ExitStack() as stack:
        for module in sharded:
            module.unshard()
            stack.callback(module.reshard)
        weights = [] if tiled.module is None else tiled.module.parameters()
        if zero3_sharded := [weight for weight in weights if is_zero3_sharded(weight)]:
            deepspeed = importlib.import_module("deepspeed")
            stack.enter_context(deepspeed.zero.GatheredParameters(zero3_sharded))
        yield


def max_over_ranks(number: int, tiled: TiledFunction, device: torch.device) -> int:
    """Return the largest `number` of all ranks that share the partitioned weights."""
    return largest_in([partition_group(tiled)], number, device)


def partition_group(tiled: TiledFunction) -> Any:
    """Return the process group of the ranks that share the partitioned weights."""
    return next(weight.ds_process_group for weight in tiled.module.parameters() if is_partitioned(weight))  # type: ignore[union-attr]


@contextlib.contextmanager
def unsharded_in_forward(fsdp_modules: list[Any]) -> Iterator[None]:
    """Keep FSDP2 modules that are gathered inside unsharded until the end."""
    groups = fsdp_param_groups(fsdp_modules)
    _restore_setting(groups)
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
    """Keeps FSDP2 modules unsharded in backward, from the first tile (`begin`) to the last (`end`)."""

    def __init__(self, fsdp_modules: list[Any]) -> None:
        self._groups = fsdp_param_groups(fsdp_modules)

    def begin(self) -> None:
        for group in self._groups:
            if not hasattr(group, _SETTING):
                setattr(group, _SETTING, group.reshard_after_backward)
            group.reshard_after_backward = False

    def end(self) -> None:
        _restore_setting(self._groups)


def _restore_setting(groups: list[Any]) -> None:
    """Give groups back their own setting, and reshard those that it tells to."""
    for group in groups:
        if hasattr(group, _SETTING):
            group.reshard_after_backward = getattr(group, _SETTING)
            delattr(group, _SETTING)
            if group.reshard_after_backward:
                group.reshard()
