"""`lowtide.tile`: the public function, the size of a tile, and the grid of tokens that tiles are cut from.

Everything but the last dimension of the input counts tokens. Tiles are contiguous runs of tokens, and keep a batch
dimension of one if there was a batch: a tile of `[4, 1000, 64]` is `[1, t, 64]`.

By default, the intermediates of a tile should take about 1 GiB: large enough that every matrix product keeps an
accelerator busy (8 000 to 32 000 tokens for the usual models), and small beside what it replaces. How much a token
takes is estimated from the module: the outputs of all its linear layers, and of as many experts as a token is routed
to.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lowtide._torch import CompiledCall, graph_break, parameters_of, send_compiler_away, swap_compiler
from lowtide.counters import TileLedger
from lowtide.errors import InvalidValueError
from lowtide.tiling.collectives import largest_in
from lowtide.tiling.surroundings import refuse_transforms
from lowtide.tiling.tiled_function import TiledFunction, max_over_ranks
from lowtide.tiling.tiler import run_tiles
from lowtide.units import parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from lowtide.tiling.weight_grads import Accumulate

T = TypeVar("T")

TILE_BYTES = 1024**3
"""The intermediates of a tile, if no size is given."""

BLOCK_TILE_BYTES = 256 * 1024**2
"""The same for a whole block, of which a tile has the attention's intermediates as well."""

MOST_BLOCK_TILES = 64
"""The most tiles of a block, if no size is given: past it, nearly all is what stays whole, and more save little."""

_DEFAULT_EXPANSION = 8
"""A function that is not a module is assumed to make intermediates of eight times its input."""


def tile(
    function: Callable[..., T],
    x: torch.Tensor,
    *args: Any,
    tokens: int | str = "auto",
    accumulate: Accumulate = "auto",
    **kwargs: Any,
) -> T:
    """Run `function(x, *args, **kwargs)` in tiles of about `tokens` tokens; one tile's intermediates live at a time.

    `function` is any token-wise module or function: its output for a token depends on that token alone. All dimensions
    of `x` but the last count tokens; tensors among the other arguments that begin with the same dimensions are split
    along, and the rest is passed to every tile as it is. Outputs may be nested; each tensor must have a row per token.

    In backward each tile is run again, so the price is one more forward, unless a checkpoint around it runs the forward
    again anyway: then there is none. Gradients, hooks, DDP, FSDP2, dropout and autocast are as without tiles.

    `tokens="auto"` aims at 1 GiB of intermediates. `accumulate` says how a low-precision weight's gradient is summed
    over tiles: `"float32"`, `"parameter"` (the weight's own type), or `"auto"` (float32, unless the sums would take
    more than 3 GiB).
    """
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        raise InvalidValueError(f"tile needs a tensor whose last dimension holds features, got {type(x).__name__}")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    ledger = TileLedger(name)
    tiled = TiledFunction(function, is_tried=False)
    return tile_call(tiled, x, (x, *args), kwargs, ledger, tokens=tokens, accumulate=accumulate)  # type: ignore[no-any-return]


tile.__module__ = "lowtide"


@graph_break("tiles are no part of a graph: compile without fullgraph=True, or compile what runs in them")
def tile_call(tiled: TiledFunction, *args: Any, **settings: Any) -> Any:
    """Run one call of a function in tiles (`_tile_call`). What a compiler around it looks into is compiled in each."""
    compiler = send_compiler_away()
    try:
        if compiler is not None:
            tiled = TiledFunction(CompiledCall(tiled.function, compiler), tiled.module, is_tried=tiled.is_tried)
        return _tile_call(tiled, *args, **settings)
    finally:
        swap_compiler(compiler)


def _tile_call(
    tiled: TiledFunction,
    x: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ledger: TileLedger,
    *,
    tokens: int | str | None = None,
    shards: int | None = None,
    accumulate: Accumulate = "auto",
    groups: Sequence[Any] = (),
) -> Any:
    """Run one call, in tiles if it is long enough.

    With FSDP2 modules inside, it goes through the tiler even as one tile: all ranks must run the same collectives.
    ZeRO-3 gathers weights again for each tile, so there the ranks agree on a number of tiles; some may be empty. So do
    ranks in `groups`, which meet in collectives inside the function.
    """
    tiles = tile_count(x, tiled.module, tokens, shards)
    if tiled.has_partitioned_weights():
        tiles = max_over_ranks(tiles, tiled, x.device)
    tiles = largest_in(groups, tiles, x.device) if groups else tiles
    if x.dim() == 1 or (tiles == 1 and not tiled.fsdp_modules()):
        ledger.calls += 1
        ledger.tiles += 1
        return tiled.function(*args, **kwargs)
    if torch.is_grad_enabled():
        refuse_transforms(ledger.name)
    return run_tiles(tiled, args, kwargs, TokenGrid(x.shape[:-1], tiles), ledger, accumulate)


def tile_count(
    x: torch.Tensor,
    module: nn.Module | None,
    tokens: int | str | None,
    shards: int | None,
    nbytes: int | None = None,
) -> int:
    """Return the number of tiles for an input: as given, or from the tokens of a tile, or from its bytes."""
    count = x.shape[:-1].numel()
    if shards is not None:
        return max(1, min(shards, count))
    size = tokens_per_tile(x, module, nbytes) if tokens in (None, "auto") else parse_tokens(tokens)
    if size < 1:
        raise InvalidValueError(f"a tile needs at least one token, got tokens={tokens!r}")
    return max(1, -(-count // size))


def tokens_per_tile(x: torch.Tensor, module: nn.Module | None, nbytes: int | None = None) -> int:
    """Return how many tokens have intermediates of `TILE_BYTES`, or of this many bytes."""
    width = _width(module) if module is not None else 0
    width = width or _DEFAULT_EXPANSION * x.shape[-1]
    return max(1, (nbytes or TILE_BYTES) // (width * x.element_size()))


def _width(module: nn.Module) -> int:
    """Estimate how many numbers a module computes for one token."""
    experts, used = 1, 1
    width = 0
    for inner in _layers(module):
        used = max(used, int(getattr(inner, "top_k", 0) or 0))
        features = getattr(inner, "out_features", None)
        if isinstance(features, int):
            width += features
        for weight in parameters_of(inner).values():
            if weight is not None and weight.dim() == 3:  # noqa: PLR2004  (all experts in one tensor)
                experts = max(experts, weight.shape[0])
                width += weight.shape[0] * max(weight.shape[1:])
        experts = max([experts, *(len(list(child.children())) for child in inner.children() if _holds_experts(child))])
    return width * used // experts if experts > used else width


def _holds_experts(module: nn.Module) -> bool:
    """Tell a list of experts, which are alike, from one of layers that run one after another, as diffusers has."""
    children = list(module.children()) if type(module).__name__ == "ModuleList" else []
    is_layer = any(isinstance(getattr(child, "out_features", None), int) for child in children)
    return len({type(child) for child in children}) == 1 and not is_layer


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all in it, but not what is in a linear layer: an adapter's parts add to the same output."""
    yield module
    if not isinstance(getattr(module, "out_features", None), int):
        for child in module.children():
            yield from _layers(child)


class TokenGrid:
    """The token dimensions of a call (`lead`), and the sizes of its tiles."""

    def __init__(self, lead: torch.Size, tiles: int) -> None:
        self.lead = lead
        self.count = lead.numel()
        self.sizes = _even_sizes(self.count, tiles)
        self.starts = [0, *itertools.accumulate(self.sizes)][:-1]
        self.flat_lead = (1, self.count) if len(lead) > 1 else (self.count,)
        self.dim = len(self.flat_lead) - 1

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has a row for each token; such tensors are split along with the input."""
        return tensor.shape[: len(self.lead)] == self.lead

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tiles of a tensor that covers the tokens.

        The stride of a tile's batch dimension of one keeps no trace of the full tensor's: torch chooses kernels by
        strides, and a tile must look the same when it is run again.
        """
        flat = tensor.reshape(*self.flat_lead, *tensor.shape[len(self.lead) :])
        return tuple(part.view(part.shape) for part in torch.split(flat, self.sizes, self.dim))

    def part(self, flat: torch.Tensor, index: int, dim: int) -> torch.Tensor:
        """Return the rows of one tile in a tensor that has all tokens in the dimension `dim`."""
        return flat.narrow(dim, self.starts[index], self.sizes[index])


def _even_sizes(count: int, tiles: int) -> list[int]:
    """Return sizes that differ by one at most: a short last tile would cost as many launches as a full one."""
    small, larger = divmod(count, tiles)
    return [small + 1] * larger + [small] * (tiles - larger)
