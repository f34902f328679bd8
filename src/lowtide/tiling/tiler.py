"""Runs a token-wise function tile by tile as ordinary nodes of the graph; one tile's intermediates live at a time.

Other tilers hide the tiles in an `autograd.Function` that calls `.backward()` on each; then parameters' hooks fire once
per tile, and DDP, router losses and unused experts break. Here each tile is run in grad mode, so its nodes are in the
graph like any others, and autograd itself sums the tiles: every hook fires once. Only what the nodes *save* is handled:

- The inputs are saved first, once, by a separate node. A checkpoint around the tiler therefore stops its recompute
  right there, before any tile is run again; a store around it sees the inputs and nothing else.
- What a tile's nodes save is dropped and numbered. When backward asks for the first of them, the tile is run again
  under its random state and autocast, up to the last number, and what it saves is handed out. Backward asks tile by
  tile, because autograd runs the youngest node first.

The saved inputs are unpacked once per backward for all tiles: torch's checkpoint refuses a second time. A gradient that
a tile takes inside its forward unpacks nothing: the inputs are still there, and a checkpoint around it would begin a
forward within the forward to find them.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch import (
    after_backward,
    attention_choice,
    attention_chosen,
    graph_task_id,
    outside_graph,
    version_if_any,
    version_of,
    without_parametrize_cache,
)
from lowtide.errors import InPlaceError, LowtideError
from lowtide.randomness import RandomState
from lowtide.tensor_tree import flatten
from lowtide.tiling.assembly import GradBuffer, GradSlice, Outputs
from lowtide.tiling.call_state import CallState
from lowtide.tiling.surroundings import refuse_compiled_backward
from lowtide.tiling.tiled_function import UnshardedInBackward, unsharded_in_forward
from lowtide.tiling.weight_grads import WeightGradAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lowtide.counters import TileLedger
    from lowtide.tensor_tree import TensorTree
    from lowtide.tiling.tile import TokenGrid
    from lowtide.tiling.tiled_function import TiledFunction
    from lowtide.tiling.weight_grads import Accumulate
    from lowtide.weights import RefuseSaved


def run_tiles(
    tiled: TiledFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grid: TokenGrid,
    ledger: TileLedger,
    accumulate: Accumulate = "auto",
    weight_grads: WeightGradAccumulator | None = None,
) -> Any:
    """Run the function on `args` and `kwargs`, with every tensor that has a row per token split into tiles.

    Weight gradients are summed by `weight_grads`, if several passes share it, or as `accumulate` says.
    """
    tensors, tree = flatten((args, kwargs))
    reached = tiled.reached((*args, *kwargs.values()))
    del args, kwargs
    fsdp_modules = tiled.fsdp_modules()
    outputs = Outputs(grid, ledger.name)
    with unsharded_in_forward(fsdp_modules):
        if not torch.is_grad_enabled():
            _count(ledger, grid)
            for index, tile in enumerate(_split(tensors, grid)):
                args, kwargs = tree.unflatten(tile)
                outputs.add(index, tiled.run_tile(index, args, kwargs))
            return outputs.assemble()
        tiles, inputs = _save_inputs(tensors, grid, fsdp_modules)
        _count(ledger, grid)  # a checkpoint around it may have ended its recompute with the line above
        call = _Call(
            tiled, tree, inputs, AutocastState(tensors[0].device), ledger, CallState(tiled, reached, ledger.name)
        )
        _run(call, tiles, weight_grads or WeightGradAccumulator(tiled, accumulate), outputs)
        return outputs.assemble()


def _count(ledger: TileLedger, grid: TokenGrid) -> None:
    ledger.calls += 1
    ledger.tiles += len(grid.sizes)


def _run(
    call: _Call, tiles: list[tuple[torch.Tensor, ...]], weight_grads: WeightGradAccumulator, outputs: Outputs
) -> None:
    before = RandomState(*tiles[0])
    for index, tensors in enumerate(tiles):
        tile = _Tile(call, index)
        args, kwargs = call.tree.unflatten(tensors)
        with (
            call.inputs.at_hand(tensors),
            weight_grads.accumulating(),
            call.autocast.restored(),
            without_parametrize_cache(),
            torch.autograd.graph.saved_tensors_hooks(tile.pack, _unpack),
        ):
            outputs.add(index, call.tiled.run_tile(index, args, kwargs))
        tile.noted.settle()
        after = RandomState(*tensors)
        if after != before:
            tile.random, before = before, after


def _split(tensors: list[torch.Tensor], grid: TokenGrid) -> list[tuple[torch.Tensor, ...]]:
    """Return the tensors of each tile: those with a row per token are split, the others are the same for all."""
    tiles = len(grid.sizes)
    columns = [grid.split(tensor) if grid.covers(tensor) else [tensor] * tiles for tensor in tensors]
    return list(zip(*columns, strict=True))


# --- Inputs ---------------------------------------------------------------------------------------------------------


class _UnpackedInputs:
    """The saved inputs, split into tiles, while a backward runs: from its first tile until the node that saved them."""

    def __init__(self, fsdp_modules: list[Any]) -> None:
        self.backward = -1
        self.tiles: list[tuple[torch.Tensor, ...]] = []
        self._unsharded = UnshardedInBackward(fsdp_modules)

    def begin(self, backward: int, tiles: list[tuple[torch.Tensor, ...]]) -> None:
        self.backward, self.tiles = backward, tiles
        self._unsharded.begin()

    def end(self) -> None:
        self.backward, self.tiles = -1, []
        self._unsharded.end()


class _Save(torch.autograd.Function):
    """Saves all tensors, and returns those that need a gradient: in tiles, if they have a buffer for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, unpacked: _UnpackedInputs, buffers: list[GradBuffer | None], grid: TokenGrid, *tensors: Any
    ) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.unpacked, ctx.buffers, ctx.tiles = unpacked, buffers, len(grid.sizes)
        ctx.needs = ctx.needs_input_grad[3:]
        returned: list[torch.Tensor] = []
        for tensor, buffer, needs in zip(tensors, buffers, ctx.needs, strict=True):
            if needs:
                returned += [tensor.view_as(tensor)] if buffer is None else grid.split(tensor)
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.unpacked.end()
        given = iter(gradients)
        found: list[torch.Tensor | None] = []
        for buffer, needs in zip(ctx.buffers, ctx.needs, strict=True):
            if not needs:
                found.append(None)
            elif buffer is None:
                found.append(next(given))
            else:
                found.append(buffer.take([next(given) for _ in range(ctx.tiles)]))
        return None, None, None, *found


def _save_inputs(
    tensors: list[torch.Tensor], grid: TokenGrid, fsdp_modules: list[Any]
) -> tuple[list[tuple[torch.Tensor, ...]], _SavedInputs]:
    """Save the inputs, and return the tensors of each tile and the way to have them again in backward."""
    unpacked = _UnpackedInputs(fsdp_modules)
    needs = [tensor.requires_grad for tensor in tensors]
    extra = [] if any(needs) else [torch.empty(0, requires_grad=True)]  # a node needs one that requires a gradient
    buffers = [GradBuffer(grid, t) if t.requires_grad and grid.covers(t) else None for t in tensors]
    given = _Save.apply(unpacked, [*buffers, *[None] * len(extra)], grid, *tensors, *extra)  # type: ignore[no-untyped-call]
    returned = iter(given)
    tiles = len(grid.sizes)
    columns: list[Sequence[torch.Tensor]] = []
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not None:
            columns.append([GradSlice.apply(buffer, index, next(returned)) for index in range(tiles)])  # type: ignore[no-untyped-call]
        elif tensor.requires_grad:
            columns.append([next(returned)] * tiles)
        else:
            columns.append(grid.split(tensor) if grid.covers(tensor) else [tensor] * tiles)
    # Before 2.13 a node dies with the last tensor that leads to it, whoever holds its Python object.
    anchor = given[0] if extra else None
    return list(zip(*columns, strict=True)), _SavedInputs(given[0].grad_fn, anchor, unpacked, needs, grid)


class _SavedInputs:
    """The inputs of a call. It holds the node that saved them; the tensors are wherever that node's hooks put them.

    `anchor` is a tensor without memory that keeps the node alive where no tile's graph does.
    """

    def __init__(
        self,
        node: Any,
        anchor: torch.Tensor | None,
        unpacked: _UnpackedInputs,
        needs_grad: list[bool],
        grid: TokenGrid,
    ) -> None:
        self._node = node
        self._anchor = anchor
        self._unpacked = unpacked
        self._needs_grad = needs_grad
        self._grid = grid
        self._at_hand: tuple[torch.Tensor, ...] | None = None
        """The inputs of the tile whose forward runs."""
        self._versions: list[int] = []

    @contextlib.contextmanager
    def at_hand(self, tensors: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """Let the tile that runs inside find its inputs without unpacking anything."""
        self._at_hand, self._versions = tensors, [*map(version_if_any, tensors)]
        try:
            yield
        finally:
            self._at_hand = None

    def tile(self, index: int, name: str) -> tuple[torch.Tensor, ...]:
        """Return the inputs of one tile as leaves of a separate graph. They are unpacked once per backward."""
        if self._at_hand is not None and [*map(version_if_any, self._at_hand)] != self._versions:
            raise InPlaceError(
                f"{name}: it changes its input by an inplace operation and takes a gradient inside its forward, for "
                "which a tile must run again on the input as it was. Modify a copy of it instead, for example "
                "x = x + 1 instead of x += 1"
            )
        tensors = zip(self._at_hand or self._unpack(index), self._needs_grad, strict=True)
        return tuple(tensor.detach().requires_grad_(needs) for tensor, needs in tensors)

    def _unpack(self, index: int) -> tuple[torch.Tensor, ...]:
        backward = graph_task_id()
        if backward < 0 or self._unpacked.backward != backward:
            saved = [tensor.detach() for tensor in self._node.saved_tensors[: len(self._needs_grad)]]
            self._unpacked.begin(backward, _split(saved, self._grid))
            if backward >= 0:  # the node may be one that no gradient reaches
                after_backward(self._unpacked.end)
        return self._unpacked.tiles[index]


# --- Calls and their tiles ------------------------------------------------------------------------------------------


class AutocastState:
    """The autocast settings of this moment, without autocast's cache of cast weights.

    A cached cast is one node of the graph, in which the tiles' gradients would be summed in low precision.
    """

    def __init__(self, device: torch.device) -> None:
        kinds = [kind for kind in {device.type, "cpu"} if torch.amp.is_autocast_available(kind)]
        self._settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set these settings inside."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._settings:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            yield


class _Call:
    """One call of a tiled function."""

    def __init__(
        self,
        tiled: TiledFunction,
        tree: TensorTree,
        inputs: _SavedInputs,
        autocast: AutocastState,
        ledger: TileLedger,
        state: CallState,
    ) -> None:
        self.tiled = tiled
        self.tree = tree
        self.inputs = inputs
        self.autocast = autocast
        self.kernels = attention_choice()
        self.ledger = ledger
        self.state = state
        self._current: weakref.ref[_Tile] | None = None

    def enter(self, tile: _Tile) -> None:
        """Begin to run a tile again: what was recomputed for the one before it and not asked for is dropped."""
        before = self._current() if self._current is not None else None
        if before is not None and before is not tile:
            before.forget()
        self._current = weakref.ref(tile)


class _Dropped(NamedTuple):
    """What the graph holds for a tensor that a tile saved: its number."""

    tile: _Tile
    number: int


class _StopRecompute(Exception):  # noqa: N818  (not an error)
    """Ends a recompute: all that backward needs has been computed."""


class _Tile:
    """One tile of one call: what kinds of tensors it saved, and those that were recomputed."""

    def __init__(self, call: _Call, index: int) -> None:
        self.random: RandomState | None = None
        self.refuse_saved: RefuseSaved | None = None
        """Refuses what it saves as it runs again, if that is a weight that was changed."""
        self._call = call
        self.noted = call.state.note()
        self._index = index
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._recomputed: list[tuple[torch.Tensor, int] | None] = []

    @outside_graph
    def pack(self, tensor: torch.Tensor) -> _Dropped:
        """Drop a tensor that is saved, and keep its number (autograd's hook)."""
        self._saved.append(_kind_of(tensor))
        return _Dropped(self, len(self._saved) - 1)

    def get(self, number: int) -> torch.Tensor:
        """Return a dropped tensor. Each is handed out once; if it is asked for again, the tile is run again."""
        # A tile that takes a gradient of its own asks while it runs, and has saved more since.
        if number >= len(self._recomputed) or self._recomputed[number] is None:
            self._recompute()
        tensor, version = self._recomputed[number]  # type: ignore[misc]  # it was just computed
        self._recomputed[number] = None
        if version_of(tensor) != version:
            raise InPlaceError(
                f"{self._call.ledger.name}: a tensor needed for backward is modified by an inplace operation after it "
                f"was saved (it was at version {version} and is now at version {version_of(tensor)}). Modify a copy of "
                "it instead, for example x = x + 1 instead of x += 1"
            )
        return tensor

    def forget(self) -> None:
        """Drop what was recomputed and not asked for."""
        self._recomputed = []

    def _recompute(self) -> None:
        call = self._call
        refuse_compiled_backward(call.ledger.name)
        call.enter(self)
        args, kwargs = call.tree.unflatten(call.inputs.tile(self._index, call.ledger.name), again=True)
        call.ledger.recomputed_tiles += 1
        self._recomputed = []
        with (
            self._until_stopped(),
            self.noted.restored() as self.refuse_saved,
            self.random.restored() if self.random is not None else contextlib.nullcontext(),
            call.autocast.restored(),
            attention_chosen(call.kernels),
            without_parametrize_cache(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(self._record, _identity),
        ):
            call.tiled.run_tile(self._index, args, kwargs)
        if len(self._recomputed) != len(self._saved):
            raise self._changed(f"{len(self._saved)} tensors", str(len(self._recomputed)))

    def _changed(self, before: str, now: str) -> LowtideError:
        return LowtideError(
            f"{self._call.ledger.name}: tile {self._index} saved {before} in forward and {now} when it was run again: "
            "it depends on something that changed in between. Make it depend on its arguments and weights alone, or "
            "do not tile it"
        )

    @contextlib.contextmanager
    def _until_stopped(self) -> Iterator[None]:
        """End the run when it has computed all that is needed. TorchScript turns what ends it into a RuntimeError."""
        try:
            yield
        except _StopRecompute:
            return
        except RuntimeError:
            if len(self._recomputed) != len(self._saved):
                raise

    @outside_graph
    def _record(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.refuse_saved is not None:
            self.refuse_saved(tensor)
        number, found = len(self._recomputed), _kind_of(tensor)
        if found != self._saved[number]:
            before, now = (f"{tuple(shape)} {dtype}" for shape, dtype in (self._saved[number], found))
            raise self._changed(f"a tensor of {before} as number {number}", f"one of {now}")
        tensor = tensor.detach()  # a node that saved its own output with its graph would keep itself alive forever
        self._recomputed.append((tensor, version_of(tensor)))
        if len(self._recomputed) == len(self._saved):
            raise _StopRecompute
        return tensor


def _kind_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


@outside_graph
def _unpack(dropped: _Dropped) -> torch.Tensor:
    return dropped.tile.get(dropped.number)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
