"""Finds the collectives inside a module: tensor parallelism, or experts on several ranks.

Ranks meet in them, so all must run a module equally often, however many tokens each has. The number of tiles is agreed
on in the groups that are found here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lowtide._torch import TorchDispatchMode, collectives_so_far, group_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self


class CollectiveGroups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the process groups of all collectives inside, in order; last those that only an operator's kernel calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups: list[Any] = []
        self._before: dict[Any, int] = {}

    def __enter__(self) -> Self:
        self._before = collectives_so_far()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        now = collectives_so_far()
        hidden = [group for group, count in now.items() if count != self._before.get(group, count)]
        self.groups += [group for group in hidden if group not in self.groups]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(_is_dtensor, types)):
            return NotImplemented  # its collectives are among what it makes of the operator
        group = group_of(func, args)
        if group is not None and group not in self.groups:
            self.groups.append(group)
        return func(*args, **(kwargs or {}))


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a `DTensor`, of which each rank may have a part."""
    return _is_dtensor(type(tensor))


def _is_dtensor(kind: type) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def largest_in(groups: Iterable[Any], number: int, device: torch.device) -> int:
    """Return the largest `number` of all ranks in some groups."""
    return largest_of_each(groups, [number], device)[0]


def largest_of_each(groups: Iterable[Any], numbers: list[int], device: torch.device) -> list[int]:
    """Return the largest of each of some numbers of all ranks in some groups."""
    groups = list(groups)
    if not groups:
        return numbers
    agreed = torch.tensor(numbers, device=device)
    for group in groups:
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
    return [int(number) for number in agreed.tolist()]


def hold_on_all(groups: Iterable[Any], device: torch.device, *statements: bool) -> list[bool]:
    """Tell which of some statements hold on all ranks in some groups."""
    return [not fails for fails in largest_of_each(groups, [int(not holds) for holds in statements], device)]
