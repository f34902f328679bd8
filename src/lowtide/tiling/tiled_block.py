"""Runs a transformer block in tiles of tokens, attention included.

A block is token-wise but for one call of an attention function (`attention_call`). So it runs tile by tile with another
function in that place, which attends from the tile's queries to the keys and values of all tokens, K and V. Norms,
projections, residuals and the MLP are in the tile as well; only the block's input, K, V and their gradients are whole.
Where K and V come from depends on the attention:

- Causal, through a fused kernel, with nothing random before it: "in order". In a checkpoint's first run each tile
  writes its own rows of K and V before it attends, so one pass does it all. In backward a pass without a graph makes
  K and V again, tiles ending at their attention, and the checkpoint's recompute stops there. A tile that is run again
  has its own keys and values in its graph, and they get the gradients of all tiles that saw them (`key_values`).
- Anything else (masks, both directions, dropout, other kernels): a pass of tiles with a graph makes K and V.

The second pass runs the block's beginning again. If random numbers are drawn there (an adapter's dropout), each tile
has a seed, so that both passes draw the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch import CHECKPOINT_HOOKS, graph_task_id, hooks_module, is_attention_replaced, uncompiled
from lowtide.compat import recorded_outputs
from lowtide.counters import TileLedger
from lowtide.errors import CannotCutError, OddCallError
from lowtide.randomness import RandomState, seeded_like
from lowtide.tensor_tree import flatten
from lowtide.tiling.attention_call import seen_by
from lowtide.tiling.attention_kernels import Rows, added_to_scores, as_autocast_would, has_kernel
from lowtide.tiling.block_arguments import BlockArguments
from lowtide.tiling.key_values import KeyValueGrads, fused_attention, hand_out, some_keys
from lowtide.tiling.packed_sequences import BOUNDS, SeenSequences, bounds_in, bounds_of
from lowtide.tiling.repacking import refuse_repacking
from lowtide.tiling.tile import TokenGrid
from lowtide.tiling.tiled_function import TiledFunction
from lowtide.tiling.tiler import run_tiles
from lowtide.tiling.weight_grads import WeightGradAccumulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from lowtide.tiling.key_values import Keep
    from lowtide.tiling.weight_grads import Accumulate

_SDPA = "transformers.integrations.sdpa_attention"


class AttentionCall(NamedTuple):
    """A call of an attention function, as a block makes it."""

    function: Callable[..., Any]
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    options: dict[str, Any]

    @property
    def reaches_other_ranks(self) -> bool:
        """Whether it attends to tokens that other ranks have: Ulysses, or torch's context parallelism."""
        return _module_of(self.function).startswith("deepspeed.") or (self.is_sdpa and is_attention_replaced())

    @property
    def is_sdpa(self) -> bool:
        """Whether it is transformers' call of torch's own attention."""
        return _module_of(self.function) == _SDPA

    @property
    def is_flash(self) -> bool:
        """Whether it is a flash attention package, which aligns causal masks to the lower right itself."""
        return "flash" in getattr(self.function, "__name__", "")

    @property
    def is_eager(self) -> bool:
        """Whether it is a model's own function, which knows a mask alone."""
        return getattr(self.function, "__name__", "").startswith("eager")

    @property
    def is_causal(self) -> bool:
        """Whether the function masks later keys itself. Models' own eager functions never do."""
        stated = self.options.get("is_causal")
        stated = getattr(self.module, "is_causal", True) if stated is None else stated
        return bool(stated) and self.mask is None and not self.is_eager

    @property
    def is_fused(self) -> bool:
        """Whether a fused kernel with row sums can take its place."""
        has_extras = self.options.get("dropout") or any(
            self.options.get(name) is not None for name in ("position_bias", "cache", "softcap", "s_aux")
        )
        is_plain = self.is_sdpa and not has_extras
        return is_plain and has_kernel(self.query, self.key, self.value, self.mask)


def _module_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__module__", None) or ""


class _AtAttention(BaseException):  # not an Exception: models catch those
    """Ends a block's forward at its attention."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__()
        self.call = call


def attention_call(forward: Callable[..., Any], named: Mapping[str, Any]) -> AttentionCall:
    """Run a block up to its call of attention, and return that call."""
    try:
        with seen_by(_end), recorded():
            forward(**named)
    except _AtAttention as end:
        return end.call
    raise CannotCutError("its forward asks for no attention function")


def _end(function: Any, module: Any, query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 4 for tensor in (query, key, value)):  # noqa: PLR2004
        raise CannotCutError("its queries, keys and values are not laid out as batch, heads, tokens, features")
    mask = options.pop("attention_mask", mask)
    raise _AtAttention(AttentionCall(function, module, query, key, value, mask, options))


@contextlib.contextmanager
def recorded(join: Callable[[list[Any]], Any] | None = None, tiles: int = 1) -> Iterator[None]:
    """Forget what transformers records inside (a router's logits), or join what `tiles` tiles recorded."""
    lists = [entries for entries in recorded_outputs().values() if isinstance(entries, list)]
    counts = [len(entries) for entries in lists]
    is_done = False
    try:
        yield
        is_done = True
    finally:
        for entries, count in zip(lists, counts, strict=True):
            added = entries[count:]
            del entries[count:]
            if is_done and join is not None and len(added) % tiles == 0:
                per_tile = len(added) // tiles
                entries += [join(added[first::per_tile]) for first in range(per_tile)]


# --- One call -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """How a block runs in tiles."""

    tiles: int
    accumulate: Accumulate = "auto"
    agree: Callable[..., list[bool]] = lambda *holds: list(holds)
    """Tells which of some statements hold on all ranks that run the same collectives."""
    keep: Callable[[int], Keep] | None = None
    """Keeps what the attention of a tile computes from forward to backward."""


def run_block(tiled: TiledFunction, named: Mapping[str, Any], settings: BlockSettings, ledger: TileLedger) -> Any:
    """Run a block's forward on its named arguments in tiles. Raises `CannotCutError` if that cannot be done."""
    hidden = next(iter(named.values()))
    batch, length = hidden.shape[:2]
    refuse_repacking(tiled.module, hidden)
    arguments = BlockArguments(named, length)
    del named, hidden
    tensors = arguments.take()
    look = _look(tiled.function, arguments, tensors)
    bounds, refusal = None, None
    try:
        _refuse_unusual(look.call, batch)
        bounds = _bounds(look.call, arguments, tensors)
        if bounds is None:
            _refuse_mask(look.call.mask, length)
    except CannotCutError as error:
        refusal = error
    is_in_order = look.call.is_fused and look.call.is_causal and not look.draws
    may_be_cut, in_order = settings.agree(refusal is None, is_in_order)
    if not may_be_cut:
        raise refusal or OddCallError(ON_ANOTHER_RANK)
    grid = TokenGrid(torch.Size((length,)), settings.tiles)
    seeds = torch.randint(2**62, (settings.tiles,)).tolist() if look.draws else None
    block = _Block(tiled, arguments, grid, look.call, batch, seeds, settings, bounds, in_order=in_order)
    key, value = block.key_values(look.call, tensors)
    try:
        with recorded(functools.partial(_joined, batch), settings.tiles):
            output = run_tiles(
                block.second_pass(), (key, value, *tensors), {}, grid, ledger, settings.accumulate, block.weight_grads
            )
    finally:
        block.token = None  # it would keep the graph of tiles that failed, which keeps the block
    outputs, tree = flatten(output)
    return tree.unflatten([tensor.movedim(0, 1).contiguous() for tensor in outputs])


ON_ANOTHER_RANK = "another rank's call of it cannot be cut, and they meet in its collectives"
"""Why a call is not cut that could be."""


def _bounds(call: AttentionCall, arguments: BlockArguments, tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return where packed sequences begin and end, if a flash attention package computes theirs by that."""
    if not call.is_flash:
        return None
    found = bounds_in(call.options, arguments.length)
    positions = arguments.position_ids(tensors)
    return bounds_of(positions) if found is None and positions is not None else found


class _Look(NamedTuple):
    call: AttentionCall
    draws: bool
    """Whether random numbers are drawn before attention."""


def _look(forward: Callable[..., Any], arguments: BlockArguments, tensors: Sequence[torch.Tensor]) -> _Look:
    """Run the first token up to its attention, to see how that is called."""
    before = RandomState(*tensors)
    with torch.no_grad(), before.restored():
        call = attention_call(uncompiled(forward), arguments.filled(arguments.first_token(tensors)))
        draws = RandomState(*tensors) != before
    query, key, value = as_autocast_would(call.query, call.key, call.value) if call.is_sdpa else call[2:5]
    return _Look(call._replace(query=query, key=key, value=value), draws)


def _refuse_unusual(call: AttentionCall, batch: int) -> None:
    refuse_other_ranks(call)
    if call.key.shape[2] != 1 or call.query.shape[2] != 1 or call.key.shape[0] != batch:
        raise CannotCutError(f"its attention has {call.key.shape[2]} keys for one token")
    if call.is_flash and call.mask is not None:
        raise OddCallError("its flash attention gets a padding mask, whose rows cannot be told from its columns")
    told = [name for name in BOUNDS if call.options.get(name) is not None]
    if told and not (call.is_flash or call.is_sdpa or call.is_eager):
        raise OddCallError(f"it is not known how its attention function takes {told[0]}")
    if call.options.get("output_attentions"):
        raise OddCallError("it returns attention weights, which tiles would return in parts")


def _refuse_mask(mask: torch.Tensor | None, length: int) -> None:
    """Refuse a mask with columns that are not keys of the call."""
    if mask is not None and mask.shape[-1] not in (1, length):
        raise OddCallError(f"its mask has {mask.shape[-1]} columns for {length} keys")


def refuse_other_ranks(call: AttentionCall) -> None:
    """Refuse attention to tokens of other ranks: a tile's keys would be those of this rank alone."""
    if call.reaches_other_ranks:
        raise OddCallError(
            "its attention is replaced by one that may reach the tokens of other ranks (context parallelism, Ulysses)"
        )


class _Block:
    """One call of a block, cut into tiles. It holds no tensor: its tiles live as long as the graph."""

    def __init__(
        self,
        tiled: TiledFunction,
        arguments: BlockArguments,
        grid: TokenGrid,
        call: AttentionCall,
        batch: int,
        seeds: list[int] | None,
        settings: BlockSettings,
        bounds: list[int] | None,
        *,
        in_order: bool,
    ) -> None:
        self._tiled = tiled
        self._arguments = arguments
        self._batch = batch
        self._settings = settings
        self._seeds = seeds
        self.grid = grid
        self.attention = call.module
        self.is_fused = call.is_fused
        """Whether a fused kernel computes its attention. Settings of the user's say so, which hold in forward alone."""
        self.bounds = bounds
        self.in_order = in_order
        self.grads = KeyValueGrads()
        is_checkpointed = hooks_module() == CHECKPOINT_HOOKS or not torch.is_grad_enabled()
        self.writes = in_order and is_checkpointed and graph_task_id() < 0
        """Whether the tiles of the second pass write K and V themselves, because nobody saves them."""
        self.weight_grads: WeightGradAccumulator | None = None
        """Sums the gradients of weights over both passes, if both have a graph."""
        self.token: torch.Tensor | None = None
        """Links each tile's attention to that of the tile before it."""

    def key_values(self, call: AttentionCall, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, or memory for them, behind a first dimension of one that hides them from the grid."""
        if self.writes:
            empty = [_longer(tensor, self.grid.count) for tensor in (call.key, call.value)]
            return empty[0].unsqueeze(0), empty[1].unsqueeze(0)
        given = [tensor.detach() for tensor in tensors] if self.in_order else list(tensors)
        first_pass = TiledFunction(self._first_tile, self._tiled.module, takes_index=True)
        if torch.is_grad_enabled() and not self.in_order:
            self.weight_grads = WeightGradAccumulator(first_pass, self._settings.accumulate, every=True)
        with torch.set_grad_enabled(self.weight_grads is not None), recorded():
            key, value = run_tiles(
                first_pass, tuple(given), {}, self.grid, TileLedger("keys and values"), weight_grads=self.weight_grads
            )
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        if not self.in_order:
            key, value = hand_out(self.grads, key, value)
        return key.unsqueeze(0), value.unsqueeze(0)

    def second_pass(self) -> TiledFunction:
        return TiledFunction(self._second_tile, self._tiled.module, takes_index=True)

    def _first_tile(self, index: int, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self._seeded(index, rows):
            call = attention_call(self._tiled.function, self._arguments.filled(rows))
        key, value = as_autocast_would(call.key, call.value) if call.is_sdpa else (call.key, call.value)
        return _with_plain_grad(key).permute(2, 0, 1, 3), _with_plain_grad(value).permute(2, 0, 1, 3)

    def _second_tile(self, index: int, key: torch.Tensor, value: torch.Tensor, *rows: torch.Tensor) -> Any:
        attention = _TileAttention(self, index, key[0], value[0])
        with self._seeded(index, rows), seen_by(attention):
            outputs, tree = flatten(self._tiled.function(**self._arguments.filled(rows)))
        expected = (self._batch, self.grid.sizes[index])
        shapes = [tuple(output.shape) for output in outputs]
        if attention.calls != 1:
            raise CannotCutError(f"it computes attention {attention.calls} times")
        if any(shape[:2] != expected for shape in shapes):
            raise CannotCutError(f"it returns tensors of shapes {shapes} for {expected[0]} x {expected[1]} tokens")
        return tree.unflatten([_with_plain_grad(output).movedim(1, 0) for output in outputs])

    def _seeded(self, index: int, rows: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._seeds is None else seeded_like(self._seeds[index], *rows)

    def keep(self, index: int) -> Keep | None:
        """Return what keeps the attention of a tile, if it is kept."""
        return None if self._settings.keep is None else self._settings.keep(index)


def _with_plain_grad(output: torch.Tensor) -> torch.Tensor:
    """Return an output whose gradient arrives as in the whole block: contiguous, not with tokens first.

    Backwards of quantized layers view it as a matrix.
    """
    if output.requires_grad:
        output.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return output


def _longer(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return memory for all tokens, laid out as the tiles of the first pass leave it."""
    batch, heads, _, width = tensor.shape
    return tensor.new_empty(length, batch, heads, width).permute(1, 2, 0, 3)


def _joined(batch: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """Join what the tiles of a batch recorded, in the order of the batch."""
    if parts[0].dim() > 2 and parts[0].shape[0] == batch:  # noqa: PLR2004
        return torch.cat(parts, 1)
    return torch.cat([part.reshape(batch, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


# --- Attention in a tile --------------------------------------------------------------------------------------------


class _TileAttention:
    """Stands in for a block's attention function in one tile."""

    def __init__(self, block: _Block, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._block = block
        self._index = index
        self._key_values = (key, value)
        self.calls = 0

    def __call__(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        **options: Any,
    ) -> Any:
        mask = options.pop("attention_mask", mask)
        if module is not self._block.attention:  # to another sequence
            return function(module, query, key, value, mask, **options)
        self.calls += 1
        call = AttentionCall(function, module, query, key, value, mask, options)
        if call.is_sdpa:
            query, key, value = as_autocast_would(query, key, value)
            call = call._replace(query=query, key=key, value=value)
        return self._fused(call) if self._block.is_fused else self._by_function(call)

    def _fused(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        block, whole = self._block, self._key_values
        start = block.grid.starts[self._index]
        end, mask = start + block.grid.sizes[self._index], call.mask
        keys = slice(0, block.grid.count) if mask is None else _visible_keys(call, start, end, block.grid.count)
        rows = Rows(start, end, call.is_causal, call.options.get("scaling"), keys)
        mask = None if mask is None else added_to_scores(mask[..., keys], call.query)
        is_forward = graph_task_id() < 0
        if block.writes and is_forward:
            for all_rows, own_rows in zip(whole, (call.key, call.value), strict=True):
                all_rows.data[:, :, rows.start : rows.end].copy_(own_rows.detach())
        own = (call.key, call.value) if block.in_order else None
        after = block.token if is_forward else None
        out, token = fused_attention(block.grads, rows, block.keep(self._index), after, call.query, own, *whole, mask)
        block.token = token if is_forward and self._index < len(block.grid.sizes) - 1 else None
        return out.transpose(1, 2).contiguous(), None

    def _by_function(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """Call the model's own attention function with the keys that the tile may see."""
        block, length = self._block, self._block.grid.count
        start = block.grid.starts[self._index]
        end = start + block.grid.sizes[self._index]
        if block.bounds is not None:
            return self._by_sequences(call, SeenSequences.of(block.bounds, start, end, is_causal=call.is_causal))
        mask = call.mask
        keys = slice(0, end) if call.is_causal else _visible_keys(call, start, end, length)
        if mask is not None and mask.shape[-1] == length:
            mask = mask[..., keys]
        if call.is_causal and not call.is_flash:  # it would align to the upper left
            mask = torch.ones(end - start, end, dtype=torch.bool, device=call.query.device).tril(start)[None, None]
        return call.function(call.module, call.query, *self._whole(keys), mask, **call.options)[0], None

    def _by_sequences(self, call: AttentionCall, seen: SeenSequences) -> tuple[torch.Tensor, None]:
        """Call a flash attention function with the sequences that the tile lies in."""
        options = call.options | seen.options(call.query.device)
        return call.function(call.module, call.query, *self._whole(seen.keys), None, **options)[0], None

    def _whole(self, keys: slice) -> list[torch.Tensor]:
        grads = self._block.grads
        return [some_keys(grads, which, keys, tensor) for which, tensor in enumerate(self._key_values)]


def _visible_keys(call: AttentionCall, start: int, end: int, length: int) -> slice:
    """Return the keys that a tile's mask lets it see; all, if there is no sliding window to make it worth a look."""
    window = call.options.get("sliding_window")
    if not isinstance(window, int) or call.mask is None:
        return slice(0, length)
    if call.mask.is_meta:
        return slice(max(0, start - window), min(length, end + window))
    is_seen = call.mask if call.mask.dtype is torch.bool else call.mask > torch.finfo(call.mask.dtype).min / 2
    if not is_seen.any(-1).all():  # a row of padding sees nothing, which softmax takes for everything
        return slice(0, length)
    seen = is_seen.flatten(0, -2).any(0).nonzero()
    return slice(int(seen[0]), int(seen[-1]) + 1)
