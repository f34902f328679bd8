"""Tiles of calls whose tokens are spread over ranks: hidden states that are a `DTensor`, and sequence parallelism.

Tiles are cut from plain tensors, so a `DTensor` is taken apart into this rank's tensor, and each tile is put together
again. That is right whatever is split: a module that is token-wise is so for the tokens of each rank.

Under sequence parallelism a module may be given all tokens and return this rank's part of them, for its last step adds
up the ranks' results and scatters the tokens. A tile of it must hold tokens of every rank's part, so that each rank
gets its own back: with two ranks and eight tokens, the tiles are 0 1 4 5 and 2 3 6 7, not 0 1 2 3 and 4 5 6 7. Then a
row that is cut is one token of each part, side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from lowtide.tensor_tree import flatten
from lowtide.tiling.collectives import is_distributed, largest_in
from lowtide.tiling.tiled_function import TiledFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

_MOST_DIMS = 3
"""Batch, tokens, features: in a tile they are the same dimensions, and so what is split is the same."""


@dataclasses.dataclass
class Spread:
    """How the tokens of one module's calls are spread over ranks."""

    mesh: Any = None
    """The mesh of hidden states that are a `DTensor`, and what of them is split over it."""
    placements: tuple[Any, ...] = ()
    parts: int = 1
    """How many ranks get a part of the tokens of the output, each its own."""
    returned: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    """What is split of each output that is a `DTensor`; nothing, where it is a plain tensor."""

    @property
    def is_whole(self) -> bool:
        """Whether each rank has all tokens, in plain tensors: then there is nothing to do."""
        return self.mesh is None and self.parts == 1

    def scattered(self, groups: list[Any], x: torch.Tensor) -> Spread | None:
        """Return the same for an output of which each rank has a part; None where that cannot be.

        `groups` are those of the collectives inside the module, and `x` are its hidden states.
        """
        is_replicated = all(place.is_replicate() for place in self.placements)
        scattered = spread_of(x, groups[0].size()) if len(groups) == 1 and is_replicated else None
        is_possible_for_all = not largest_in(groups, int(scattered is None), x.device)
        return scattered if is_possible_for_all else None

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of a call as a plain tensor, with what must not be cut apart in one row."""
        local: torch.Tensor = x if self.mesh is None else x.to_local()  # type: ignore[attr-defined]
        if self.parts == 1:
            return local
        *lead, count, features = local.shape
        apart = local.view(*lead, self.parts, count // self.parts, features)
        return apart.transpose(-3, -2).reshape(*lead, count // self.parts, self.parts * features)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module's forward with such rows, and return this rank's part of its output."""
        tensors, tree = flatten((args, kwargs))
        index = hidden_index(tensors)
        if index is None:
            raise ValueError("no argument has tokens")
        tensors[index] = self._tokens(tensors[index])
        args, kwargs = tree.unflatten(tensors)
        given, tree = flatten(forward(*args, **kwargs))
        outputs: list[Any] = [*given]
        self.returned[:] = [tuple(output.placements) if is_distributed(output) else () for output in outputs]
        return tree.unflatten([output.to_local() if is_distributed(output) else output for output in outputs])

    def whole(self, output: Any) -> Any:
        """Return the assembled output of all tiles as the module itself would have returned it."""
        tensors, tree = flatten(output)
        pairs = zip(tensors, self.returned, strict=True)
        return tree.unflatten([self._distributed(t, placements) if placements else t for t, placements in pairs])

    def _tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of some rows as the module expects them."""
        if self.parts > 1:
            *lead, count, width = rows.shape
            apart = rows.view(*lead, count, self.parts, width // self.parts)
            rows = apart.transpose(-3, -2).reshape(*lead, count * self.parts, width // self.parts)
        return rows if self.mesh is None else self._distributed(rows, self.placements)

    def _distributed(self, local: torch.Tensor, placements: tuple[Any, ...]) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, self.mesh, placements, run_check=False)


def spread_of(x: torch.Tensor, parts: int = 1) -> Spread | None:
    """Return how the tokens of hidden states are spread; None if not every rank has as many of them.

    `parts` is how many ranks get a part of the output each, as a trial has found.
    """
    if x.dim() < 2 or x.shape[-2] % parts:  # noqa: PLR2004  (tokens, features)
        return None
    if not is_distributed(x):
        return Spread(parts=parts)
    mesh, placements = x.device_mesh, tuple(x.placements)  # type: ignore[attr-defined]
    split = [(place.dim, mesh.size(at)) for at, place in enumerate(placements) if place.is_shard()]
    is_even = x.dim() <= _MOST_DIMS and not any(x.shape[dim] % ranks for dim, ranks in split)
    return Spread(mesh, placements, parts) if is_even else None


def spread_function(spread: Spread, forward: Callable[..., Any], module: nn.Module) -> TiledFunction:
    """Return a module's forward as a function of rows."""
    return TiledFunction(functools.partial(spread.run, forward), module)


def hidden_index(tensors: list[torch.Tensor]) -> int | None:
    """Return the place of the first tensor that holds features of tokens."""
    return next((at for at, one in enumerate(tensors) if one.is_floating_point() and one.dim() > 1), None)
