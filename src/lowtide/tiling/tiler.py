"""The graph-native tiler: a token-wise function runs tile by tile, and one tile's intermediates live at a time.

Others hide the tiles in an `autograd.Function` that calls `.backward()` on each; then parameters' hooks fire per tile,
and DDP, router losses and unused experts break. Here each tile is run in grad mode, so its nodes are in the graph like
any others, and autograd itself sums the tiles: every hook fires once. Only what the nodes *save* is handled:

- The inputs are saved first, once, by a node of their own. A checkpoint around the tiler thereby stops its recompute
  right there, before any tile is run again; a store around it sees the inputs and nothing else.
- What a tile's nodes save is dropped and numbered. When backward asks for the first of them, the tile is run again
  under its random state and autocast, up to the last number, and what it saves is handed out. Backward asks tile by
  tile, because autograd takes the youngest node first.

The saved inputs are unpacked once per backward for all tiles: torch's checkpoint refuses a second time.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch import after_backward, graph_task_id, version_of
from lowtide.buffers import Snapshot
from lowtide.errors import InPlaceError, LowtideError
from lowtide.randomness import RandomState
from lowtide.tensor_tree import flatten
from lowtide.tiling.assembly import GradBuffer, GradSlice, Outputs
from lowtide.tiling.tiled_function import UnshardedInBackward, check_unchanged, unsharded_in_forward
from lowtide.tiling.weight_grads import WeightGradAccumulator, swapped_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lowtide.counters import TileLedger
    from lowtide.tensor_tree import TensorTree
    from lowtide.tiling.tile import TokenGrid
    from lowtide.tiling.tiled_function import TiledFunction
    from lowtide.tiling.weight_grads import Accumulate


class Autocast:
    """Autocast as it is now, without its cache of cast weights.

    A cached cast belongs to one graph node, in which the tiles' gradients would be summed in low precision.
    """

    def __init__(self, device: torch.device) -> None:
        kinds = [kind for kind in {device.type, "cpu"} if torch.amp.is_autocast_available(kind)]
        self._settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._settings:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            yield


def run_tiles(
    tiled: TiledFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grid: TokenGrid,
    ledger: TileLedger,
    accumulate: Accumulate = "auto",
) -> Any:
    """The function of `args` and `kwargs`, with every tensor that has a row per token cut into tiles."""
    tensors, tree = flatten((args, kwargs))
    del args, kwargs
    units = tiled.fsdp_modules()
    outputs = Outputs(grid, ledger.name)
    with unsharded_in_forward(units):
        if not torch.is_grad_enabled():
            _count(ledger, grid)
            for index, tile in enumerate(_cut(tensors, grid)):
                args, kwargs = tree.unflatten(tile)
                outputs.add(index, tiled.function(*args, **kwargs))
            return outputs.finished()
        tiles, inputs = _save(tensors, grid, units)
        _count(ledger, grid)  # a checkpoint around it may have ended its recompute with the line above
        call = _Call(tiled, tree, inputs, Autocast(tensors[0].device), ledger)
        _run(call, tiles, WeightGradAccumulator(tiled, accumulate), outputs)
        return outputs.finished()


def _count(ledger: TileLedger, grid: TokenGrid) -> None:
    ledger.calls += 1
    ledger.tiles += len(grid.sizes)


def _run(call: _Call, tiles: list[tuple[torch.Tensor, ...]], sums: WeightGradAccumulator, outputs: Outputs) -> None:
    before = RandomState(*tiles[0])
    for index, tensors in enumerate(tiles):
        tile = _Tile(call, index)
        args, kwargs = call.tree.unflatten(tensors)
        with sums.used(), call.autocast.restored(), torch.autograd.graph.saved_tensors_hooks(tile.pack, _unpack):
            outputs.add(index, call.tiled.function(*args, **kwargs))
        after = RandomState(*tensors)
        if after != before:
            tile.random, before = before, after


def _cut(tensors: list[torch.Tensor], grid: TokenGrid) -> list[tuple[torch.Tensor, ...]]:
    """The tensors of each tile: those with a row per token are cut, the others are the same for all."""
    tiles = len(grid.sizes)
    columns = [grid.cut(tensor) if grid.covers(tensor) else [tensor] * tiles for tensor in tensors]
    return list(zip(*columns, strict=True))


class _Unpacked:
    """The saved inputs while a backward runs, cut into tiles. Begun by its first tile, ended by the node that saved."""

    def __init__(self, units: list[Any]) -> None:
        self.backward = -1
        self.tiles: list[tuple[torch.Tensor, ...]] = []
        self._unsharded = UnshardedInBackward(units)

    def begin(self, backward: int, tiles: list[tuple[torch.Tensor, ...]]) -> None:
        self.backward, self.tiles = backward, tiles
        self._unsharded.begin()

    def end(self) -> None:
        self.backward, self.tiles = -1, []
        self._unsharded.end()


class _Save(torch.autograd.Function):
    """Saves all tensors, and hands on those that need a gradient: in tiles, if they have a landing for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, unpacked: _Unpacked, landings: list[GradBuffer | None], grid: TokenGrid, *tensors: Any
    ) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.unpacked, ctx.landings, ctx.tiles = unpacked, landings, len(grid.sizes)
        ctx.needs = ctx.needs_input_grad[3:]
        handed_on: list[torch.Tensor] = []
        for tensor, landing, needs in zip(tensors, landings, ctx.needs, strict=True):
            if needs:
                handed_on += [tensor.view_as(tensor)] if landing is None else grid.cut(tensor)
        return tuple(handed_on)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.unpacked.end()
        given = iter(gradients)
        found: list[torch.Tensor | None] = []
        for landing, needs in zip(ctx.landings, ctx.needs, strict=True):
            if not needs:
                found.append(None)
            elif landing is None:
                found.append(next(given))
            else:
                found.append(landing.take([next(given) for _ in range(ctx.tiles)]))
        return None, None, None, *found


def _save(
    tensors: list[torch.Tensor], grid: TokenGrid, units: list[Any]
) -> tuple[list[tuple[torch.Tensor, ...]], _SavedInputs]:
    """The tensors of each tile, and a way to have them again in backward."""
    unpacked = _Unpacked(units)
    needs = [tensor.requires_grad for tensor in tensors]
    carrier = [] if any(needs) else [torch.empty(0, requires_grad=True)]  # a node needs one that requires a gradient
    landings = [GradBuffer(grid, t) if t.requires_grad and grid.covers(t) else None for t in tensors]
    given = _Save.apply(unpacked, [*landings, *[None] * len(carrier)], grid, *tensors, *carrier)  # type: ignore[no-untyped-call]
    handed_on = iter(given)
    tiles = len(grid.sizes)
    columns: list[Sequence[torch.Tensor]] = []
    for tensor, landing in zip(tensors, landings, strict=True):
        if landing is not None:
            columns.append([GradSlice.apply(landing, index, next(handed_on)) for index in range(tiles)])  # type: ignore[no-untyped-call]
        elif tensor.requires_grad:
            columns.append([next(handed_on)] * tiles)
        else:
            columns.append(grid.cut(tensor) if grid.covers(tensor) else [tensor] * tiles)
    return list(zip(*columns, strict=True)), _SavedInputs(given[0].grad_fn, unpacked, needs, grid)


class _SavedInputs:
    """The inputs of a call. It holds the node that saved them; the tensors are wherever that node's hooks put them."""

    def __init__(self, node: Any, unpacked: _Unpacked, needs_grad: list[bool], grid: TokenGrid) -> None:
        self._node = node
        self._unpacked = unpacked
        self._needs_grad = needs_grad
        self._grid = grid

    def tile(self, index: int) -> tuple[torch.Tensor, ...]:
        """The inputs of one tile, as leaves of a graph of their own. They are unpacked once per backward."""
        backward = graph_task_id()
        if backward < 0 or self._unpacked.backward != backward:
            saved = [tensor.detach() for tensor in self._node.saved_tensors[: len(self._needs_grad)]]
            self._unpacked.begin(backward, _cut(saved, self._grid))
            if not any(self._needs_grad) and backward >= 0:  # no gradient will come by the node
                after_backward(self._unpacked.end)
        tensors = zip(self._unpacked.tiles[index], self._needs_grad, strict=True)
        return tuple(tensor.detach().requires_grad_(needs) for tensor, needs in tensors)


class _Call:
    """One call of a tiled function."""

    def __init__(
        self, tiled: TiledFunction, tree: TensorTree, inputs: _SavedInputs, autocast: Autocast, ledger: TileLedger
    ) -> None:
        self.tiled = tiled
        self.tree = tree
        self.inputs = inputs
        self.autocast = autocast
        self.ledger = ledger
        self._weights = tiled.weights()
        self._current: weakref.ref[_Tile] | None = None

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """The weights that forward used, unchanged, wherever they are now; and buffers that nobody counts up twice."""
        check_unchanged(self._weights, self.ledger.name)
        before = None if self.tiled.module is None else Snapshot(self.tiled.module)
        try:
            with swapped_in(self._weights, [weight.tensor for weight in self._weights]):
                yield
        finally:
            if before is not None:
                before.changed().restore()

    def enter(self, tile: _Tile) -> None:
        """A tile is run again: what the one before it did not need after all goes."""
        before = self._current() if self._current is not None else None
        if before is not None and before is not tile:
            before.forget()
        self._current = weakref.ref(tile)


class _Dropped(NamedTuple):
    """What the graph holds for a tensor that a tile saved."""

    tile: _Tile
    number: int


class _Enough(Exception):  # noqa: N818  (not an error: it ends a recompute)
    """All that backward needs has been computed."""


class _Tile:
    """One tile of one call: how many tensors it saved, and those that were computed again."""

    def __init__(self, call: _Call, index: int) -> None:
        self.random: RandomState | None = None
        self._call = call
        self._index = index
        self._saved = 0
        self._recomputed: list[tuple[torch.Tensor, int] | None] = []

    def pack(self, _tensor: torch.Tensor) -> _Dropped:
        """Autograd's pack hook: the tensor goes, its number stays."""
        self._saved += 1
        return _Dropped(self, self._saved - 1)

    def get(self, number: int) -> torch.Tensor:
        """A tensor again. Each is handed out once; asked for another time, the tile is run another time."""
        if not self._recomputed or self._recomputed[number] is None:
            self._recompute()
        tensor, version = self._recomputed[number]  # type: ignore[misc]  # it was just computed
        self._recomputed[number] = None
        if version_of(tensor) != version:
            raise InPlaceError(
                f"{self._call.ledger.name}: a tensor that backward needs is modified by an inplace operation after it "
                f"was saved (version {version}, now {version_of(tensor)}): change a copy of it instead"
            )
        return tensor

    def forget(self) -> None:
        """Let go of what was computed again and not asked for."""
        self._recomputed = []

    def _recompute(self) -> None:
        call = self._call
        call.enter(self)
        args, kwargs = call.tree.unflatten(call.inputs.tile(self._index))
        call.ledger.recomputed_tiles += 1
        self._recomputed = []
        with (
            self._until_enough(),
            call.as_in_forward(),
            self.random.restored() if self.random is not None else contextlib.nullcontext(),
            call.autocast.restored(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(self._record, _as_it_is),
        ):
            call.tiled.function(*args, **kwargs)
        if len(self._recomputed) != self._saved:
            raise LowtideError(
                f"{call.ledger.name}: tile {self._index} saved {self._saved} tensors in forward and "
                f"{len(self._recomputed)} when it was run again: what it computes depends on something that changed. "
                "Let it depend on its arguments and weights alone, or do not tile it"
            )

    @contextlib.contextmanager
    def _until_enough(self) -> Iterator[None]:
        """Ends the run when it has made all that is needed. TorchScript makes a RuntimeError of what ends it."""
        try:
            yield
        except _Enough:
            return
        except RuntimeError:
            if len(self._recomputed) != self._saved:
                raise

    def _record(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()  # a node that saved its own output with its graph would hold itself for ever
        self._recomputed.append((tensor, version_of(tensor)))
        if len(self._recomputed) == self._saved:
            raise _Enough
        return tensor


def _unpack(dropped: _Dropped) -> torch.Tensor:
    return dropped.tile.get(dropped.number)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
