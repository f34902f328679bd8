"""The public function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lowtide.errors import InvalidValueError
from lowtide.measure import TileLedger
from lowtide.tiling.callee import Callee
from lowtide.tiling.sharded import most_of_all_ranks
from lowtide.tiling.size import tile_count
from lowtide.tiling.tiler import run_tiles
from lowtide.tiling.tokens import TokenGrid

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.tiling.sums import Accumulate

T = TypeVar("T")


def tile(
    function: Callable[..., T],
    x: torch.Tensor,
    *args: Any,
    tokens: int | str = "auto",
    accumulate: Accumulate = "auto",
    **kwargs: Any,
) -> T:
    """`function(x, *args, **kwargs)` in tiles of about `tokens` tokens; only one tile's intermediates live at a time.

    `function` is any token-wise module or function: what it makes of a token depends on that token alone. All
    dimensions of `x` but the last count tokens; tensors among the other arguments that begin with the same dimensions
    are cut along, the rest is passed to every tile as it is. Outputs may be nested; each tensor must have a row per
    token.

    In backward each tile is run again, so the price is one more forward, unless a checkpoint around it runs the forward
    again anyway: then there is none. Gradients, hooks, DDP, FSDP2, dropout and autocast are as without tiles.

    `tokens="auto"` aims at 1 GiB of intermediates. `accumulate` says how a low-precision weight's gradient is summed
    over tiles: `"float32"`, `"parameter"` (its own type), or `"auto"` (float32, unless the sums would take more than
    3 GiB).
    """
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        raise InvalidValueError(f"tile needs a tensor whose last dimension holds features, got {type(x).__name__}")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return tile_call(Callee(function), x, (x, *args), kwargs, TileLedger(name), tokens=tokens, accumulate=accumulate)  # type: ignore[no-any-return]


@torch._disable_dynamo  # type: ignore[attr-defined]
def tile_call(
    callee: Callee,
    x: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ledger: TileLedger,
    *,
    tokens: int | str | None = None,
    shards: int | None = None,
    accumulate: Accumulate = "auto",
) -> Any:
    """One call, in tiles if it is long enough.

    With FSDP2 units inside it goes through the tiler even as one tile: all ranks must run the same collectives. ZeRO-3
    gathers weights for each tile anew, so there the ranks agree on a number of tiles; some may be empty.
    """
    tiles = tile_count(x, callee.module, tokens, shards)
    if callee.has_partitioned_weights():
        tiles = most_of_all_ranks(tiles, callee, x.device)
    if x.dim() == 1 or (tiles == 1 and not callee.units()):
        ledger.calls += 1
        ledger.tiles += 1
        return callee.function(*args, **kwargs)
    return run_tiles(callee, args, kwargs, TokenGrid(x.shape[:-1], tiles), ledger, accumulate)
