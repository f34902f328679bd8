"""What the seam of a transformer block does under `tile(attention)`: run all of it in tiles, after a trial.

A block that cannot run so is refused by name. With plain `tile`, which means every part that the model takes, it is
left alone instead: its calls run whole, its MLP runs in tiles, and the report says why.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch import graph_task_id, uncompiled
from lowtide.applying.caches import CacheDropper, holds_cache
from lowtide.checkpointing.kept_outputs import COMPUTE
from lowtide.compat import recorded_outputs
from lowtide.errors import CannotCutError, NotTokenWiseError
from lowtide.tensor_tree import flatten
from lowtide.tiling.attention_kernels import kernel_of
from lowtide.tiling.block_arguments import hidden_states
from lowtide.tiling.block_trial import BlockTrial
from lowtide.tiling.collectives import has_several_ranks, is_distributed, largest_in
from lowtide.tiling.hooks import inner_hooks
from lowtide.tiling.surroundings import refuse_transforms
from lowtide.tiling.tile import BLOCK_TILE_BYTES, MOST_BLOCK_TILES, tile_count
from lowtide.tiling.tiled_block import BlockSettings, run_block
from lowtide.tiling.tiled_function import TiledFunction, max_over_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from lowtide.applying.guard import Guard
    from lowtide.applying.tile_runtime import TileRuntime
    from lowtide.checkpointing.keeping import Keeping
    from lowtide.checkpointing.kept_outputs import KeptOutputs
    from lowtide.counters import TileLedger
    from lowtide.policy import Policy


_SPLIT_SEQUENCE = (
    "its hidden states are a DTensor, of which this rank has a part: attention gathers the sequence anew in each tile"
)


class BlockRuntime:
    """Runs one block in tiles. With `probe=False`, it is taken for fit without a trial."""

    def __init__(
        self,
        policy: Policy,
        ledger: TileLedger,
        inner: Sequence[TileRuntime],
        keeping: Keeping | None,
        guard: Guard,
        *,
        probe: bool,
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._inner = tuple(inner)
        self._keeping = keeping
        self._caches = CacheDropper(ledger.name, note=guard.note_cache, warn=guard.warn_once)
        self._probe = probe
        self._may_be_left_alone = policy.tiles_what_it_can
        self._tried: dict[_Case, list[Any] | str] = {}
        """What it was tried out as, and the groups of the collectives in it, or why it cannot be cut."""

    def is_active(self, module: nn.Module) -> bool:  # noqa: ARG002  (in training or not)
        """Return True: a long forward without gradients has intermediates, too."""
        return True

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block in tiles of tokens if its call is long enough; plainly otherwise."""
        named = _named_arguments(forward, args, kwargs)
        hidden = None if named is None else hidden_states(named)
        if hidden is not None and is_distributed(hidden):
            return self._run_uncut(module, forward, args, kwargs, CannotCutError(_SPLIT_SEQUENCE))
        if named is None or hidden is None or _reads_cache(module, named):
            return self._run_whole(forward, args, kwargs, "its hidden states are not batch, tokens, features")
        tiled = TiledFunction(_BareForward(self._inner, forward), module)
        case = _Case.of(module, named)
        tiles = self._tiles(hidden, tiled)
        if tiles == 1 and not (tiled.has_partitioned_weights() or has_several_ranks()):
            return self._run_whole(forward, args, kwargs)
        if isinstance(self._tried.get(case), str):
            return self._run_whole(forward, args, kwargs)
        refuse_transforms(self._ledger.name)
        _, named = self._caches.dropped(module, (), named)
        try:
            with self._unseen():
                if case not in self._tried:
                    self._tried[case] = self._try_out(tiled, named, hidden.shape[1])
                return self._run(tiled, named, hidden, tiles, self._tried[case])
        except CannotCutError as reason:
            self._tried[case] = str(reason)  # the error itself would hold the trial's tensors in its traceback
            return self._run_uncut(module, forward, args, kwargs, reason)

    def _run_uncut(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: CannotCutError,
    ) -> Any:
        """Run a call whole that cannot be cut, or refuse it if the policy insists on tiles of attention."""
        if not self._may_be_left_alone:
            raise self._refusal(module, reason) from reason
        return self._run_whole(forward, args, kwargs, str(reason))

    def _run_whole(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = ""
    ) -> Any:
        """Run a call whole, and note why if it is long enough to be cut."""
        if reason and not self._ledger.left_alone:
            self._ledger.left_alone = reason
        self._ledger.calls += 1
        self._ledger.tiles += 1
        return forward(*args, **kwargs)

    def _try_out(self, tiled: TiledFunction, named: Mapping[str, Any], length: int) -> list[Any]:
        """Return the groups of the collectives in the block, or raise `CannotCutError` if it must not be cut."""
        if "attentions" in recorded_outputs():
            raise CannotCutError("output_attentions asks for its attention weights, which tiles would return in parts")
        if not self._probe or length == 1:
            return []
        hooks = inner_hooks(tiled.module)
        plain = TiledFunction(uncompiled(tiled.function), tiled.module)
        finding = BlockTrial(self._ledger.name, plain, named, length).run(hooks)
        if finding.fault is not None:
            raise CannotCutError(finding.fault)
        return finding.groups

    def _run(self, tiled: TiledFunction, named: dict[str, Any], hidden: torch.Tensor, tiles: int, groups: Any) -> Any:
        largest = functools.partial(_largest, tiled, groups, hidden.device)
        tiles = largest(tiles)
        if tiles == 1:
            self._ledger.calls += 1
            self._ledger.tiles += 1
            return tiled.function(**named)
        settings = BlockSettings(tiles=tiles, agree=lambda holds: not largest(int(not holds)), keep=self._keep())
        return run_block(tiled, named, settings, self._ledger)

    def _unseen(self) -> contextlib.AbstractContextManager[None]:
        """Hide the tiles from what keeps operators of the region's call, if it keeps any."""
        call = None if self._keeping is None else self._keeping.running
        return contextlib.nullcontext() if call is None else call.looking_away()

    def _keep(self) -> Callable[[int], Any] | None:
        """Return how the region's call that runs keeps the attention of a tile; None if it does not."""
        call = None if self._keeping is None else self._keeping.running
        return None if call is None else functools.partial(_keep_tile, call.of_tiles)

    def _tiles(self, hidden: torch.Tensor, tiled: TiledFunction) -> int:
        policy = self._policy
        count = tile_count(hidden, tiled.module, policy.tile_tokens, policy.tile_shards, BLOCK_TILE_BYTES)
        is_given = policy.tile_tokens is not None or policy.tile_shards is not None
        return min(count, hidden.shape[1] if is_given else MOST_BLOCK_TILES, hidden.shape[1])

    def _refusal(self, module: nn.Module, reason: CannotCutError) -> NotTokenWiseError:
        name, kind = self._ledger.name, type(module).__name__
        return NotTokenWiseError(
            f"{name} ({kind}) cannot run in tiles with its attention: {reason}. Leave it out with a rule: "
            f"'tile(attention); {name}: none', or write 'tile', which leaves such blocks alone"
        )


class _Case(NamedTuple):
    """What a trial holds for: a mode, the hooks, and the arguments that are given."""

    is_training: bool
    hooks: frozenset[tuple[str, object]]
    given: frozenset[str]

    @staticmethod
    def of(module: nn.Module, named: Mapping[str, Any]) -> _Case:
        hooks = frozenset(hook.kind for hook in inner_hooks(module))
        return _Case(module.training, hooks, frozenset(name for name, value in named.items() if flatten(value)[0]))


def _largest(tiled: TiledFunction, groups: Sequence[Any], device: torch.device, number: int) -> int:
    """Return the largest `number` of all ranks that meet in the block's collectives."""
    if tiled.has_partitioned_weights():
        number = max_over_ranks(number, tiled, device)
    return largest_in(groups, number, device) if groups else number


def _keep_tile(outputs: KeptOutputs, index: int) -> Callable[..., Any]:
    """Return a function that keeps the attention of one tile in forward, and recalls it in backward."""

    def keep(compute: Callable[[], Any], query: torch.Tensor) -> Any:
        operator = kernel_of(query)
        if operator not in outputs.operators:
            return compute()
        if graph_task_id() < 0:
            found = compute()
            outputs.keep(index, operator, found, ())
            return found
        found = outputs.recall(index, operator, 0)
        return compute() if found is COMPUTE else found

    return keep


class _BareForward:
    """A block's forward without the tiles of the modules in it."""

    def __init__(self, inner: Sequence[TileRuntime], forward: Callable[..., Any]) -> None:
        self._inner = inner
        self._forward = forward

    def __call__(self, **named: Any) -> Any:
        for runtime in self._inner:
            runtime.suspended += 1
        try:
            return self._forward(**named)
        finally:
            for runtime in self._inner:
                runtime.suspended -= 1

    @property
    def _torchdynamo_orig_callable(self) -> _BareForward:
        """The same without compilation, by the name under which torch's compiled functions have it."""
        return _BareForward(self._inner, uncompiled(self._forward))


def _named_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return a call's arguments by name; None if they have none."""
    parameters = inspect.signature(forward).parameters
    positional = [name for name, parameter in parameters.items() if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(positional):
        return None
    named = dict(zip(positional, args, strict=False)) | kwargs
    return {name: named.pop(name) for name in positional if name in named} | named


def _reads_cache(module: nn.Module, named: Mapping[str, Any]) -> bool:
    """Return whether the call needs its cache: one that generates does, also of a model left in training mode."""
    is_training = module.training and torch.is_grad_enabled()
    return not is_training and any(holds_cache(name, value) for name, value in named.items())
