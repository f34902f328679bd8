"""What the seam of a transformer block does under `tile(attention)`: run all of it in tiles, after a trial.

A block that cannot run so is refused by name. With plain `tile`, which means every part that the model takes, it is
left alone instead: its calls run whole, its MLP runs in tiles, and the report says why.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch import graph_task_id, uncompiled
from lowtide.applying.caches import CacheDropper, holds_cache
from lowtide.checkpointing.kept_operators import ATTENTION
from lowtide.checkpointing.kept_outputs import COMPUTE
from lowtide.compat import recorded_outputs
from lowtide.errors import CannotCutError, NotTokenWiseError, OddCallError
from lowtide.randomness import RandomState
from lowtide.tensor_tree import flatten
from lowtide.tiling.attention_kernels import kernel_of
from lowtide.tiling.block_arguments import BlockArguments, hidden_states
from lowtide.tiling.block_trial import BlockTrial
from lowtide.tiling.collectives import has_several_ranks, hold_on_all, is_distributed, largest_of_each
from lowtide.tiling.hooks import inner_hooks
from lowtide.tiling.probe import Finding
from lowtide.tiling.surroundings import refuse_transforms
from lowtide.tiling.tile import BLOCK_TILE_BYTES, MOST_BLOCK_TILES, tile_count
from lowtide.tiling.tiled_block import ON_ANOTHER_RANK, BlockSettings, run_block
from lowtide.tiling.tiled_function import TiledFunction, partition_group
from lowtide.weights import is_fsdp1

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
        self._guard = guard
        self._caches = CacheDropper(ledger.name, note=guard.note_cache, warn=guard.warn_once)
        self._probe = probe
        self._may_be_left_alone = policy.tiles_what_it_can
        self._faults: dict[_Case, str] = {}
        """What its trials found: why it cannot be cut, or nothing."""
        self._groups: list[Any] | None = None
        """The groups of the collectives in it; None until a trial has shown them."""

    def is_active(self, module: nn.Module) -> bool:  # noqa: ARG002  (in training or not)
        """Return True: a long forward without gradients has intermediates, too."""
        return True

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block in tiles of tokens if its call is long enough; plainly otherwise."""
        named = _named_arguments(forward, args, kwargs)
        hidden = None if named is None else hidden_states(named)
        if hidden is not None and is_distributed(hidden):
            if not self._may_be_left_alone:
                raise self._refusal(module, _SPLIT_SEQUENCE)
            return self._run_whole(forward, args, kwargs, _SPLIT_SEQUENCE)
        if named is None or hidden is None:
            return self._run_as_it_must(forward, args, kwargs, "its hidden states are not batch, tokens, features")
        tiles = self._tiles(hidden, module)
        if _reads_cache(module, named):
            return self._run_whole(forward, args, kwargs, "it needs its key-value cache" if tiles > 1 else "")
        tiled = TiledFunction(_BareForward(self._inner, forward), module)
        ranks = _Ranks(tiled, self._groups or (), hidden.device)
        if tiles == 1 and not ranks and not self._is_first:
            return self._run_whole(forward, args, kwargs)
        before = RandomState(hidden)
        counted = self._ledger.calls, self._ledger.tiles
        try:
            with self._unseen():
                return self._run(module, tiled, named, hidden, tiles, ranks)
        except CannotCutError as reason:
            if ranks.have_begun:
                raise self._refusal(module, f"{reason}, which its ranks learn while they run its tiles") from reason
            if not self._may_be_left_alone:
                raise self._refusal(module, reason) from reason
            text = str(reason)  # the error itself would hold the trial's tensors in its traceback
        before.set()  # tiles may have drawn from it
        self._ledger.calls, self._ledger.tiles = counted
        return self._run_whole(forward, args, kwargs, text if tiles > 1 else "")

    def _run(
        self,
        module: nn.Module,
        tiled: TiledFunction,
        named: dict[str, Any],
        hidden: torch.Tensor,
        tiles: int,
        ranks: _Ranks,
    ) -> Any:
        """Run a call in tiles, after a trial if it is the first of its kind on any of the ranks that meet in it."""
        _refuse_units(module, tiled)
        case = _Case.of(module, named)
        reason = self._faults.get(case) or _why_odd(named, hidden.shape[1])
        is_refused, is_new, tiles = ranks.largest(int(bool(reason)), int(case not in self._faults), tiles)
        if tiles == 1 and (is_refused or not self._is_first):
            return self._run_one(tiled, named)
        if is_refused:
            raise CannotCutError(reason or ON_ANOTHER_RANK)
        refuse_transforms(self._ledger.name)
        _, named = self._caches.dropped(module, (), named)
        if is_new:
            reason = self._try_out(tiled, case, named, hidden.shape[1])
            ranks.add(self._groups or ())
            is_refused, tiles = ranks.largest(int(bool(reason)), tiles)
            if is_refused:
                raise CannotCutError(reason or ON_ANOTHER_RANK)
        if tiles == 1:
            return self._run_one(tiled, named)
        settings = BlockSettings(tiles=tiles, agree=ranks.agree, keep=self._keep())
        output = run_block(tiled, named, settings, self._ledger)
        self._note_unkept()
        return output

    @property
    def _is_first(self) -> bool:
        """Whether it is not known yet which ranks meet in the block: then all try it out in their first call."""
        return self._groups is None and has_several_ranks()

    def _run_one(self, tiled: TiledFunction, named: dict[str, Any]) -> Any:
        self._ledger.calls += 1
        self._ledger.tiles += 1
        return tiled.function(**named)

    def _run_as_it_must(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
    ) -> Any:
        """Run a call whole whose block is none that could ever be cut; the guard objects if it should be."""
        if not self._may_be_left_alone:
            self._guard.note_uncut(self._ledger.name, reason)
        return self._run_whole(forward, args, kwargs, reason)

    def _run_whole(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = ""
    ) -> Any:
        """Run a call whole, and note why, if it is long enough to be cut."""
        if reason:
            self._ledger.left_alone = self._ledger.left_alone or reason
            self._ledger.left_alone_calls += 1
        self._ledger.calls += 1
        self._ledger.tiles += 1
        return forward(*args, **kwargs)

    def _try_out(self, tiled: TiledFunction, case: _Case, named: Mapping[str, Any], length: int) -> str:
        """Try the block out, and return why this call cannot be cut, if so. What holds for others like it is kept."""
        if not self._probe:
            self._faults[case] = ""
            return ""
        plain = TiledFunction(uncompiled(tiled.function), tiled.module)
        try:
            finding = BlockTrial(self._ledger.name, plain, named, length).run(inner_hooks(tiled.module))
        except OddCallError as reason:
            return str(reason)
        except CannotCutError as reason:
            finding = Finding(str(reason), [])
        known = self._groups or []
        self._groups = [*known, *(group for group in finding.groups if group not in known)]
        self._faults[case] = finding.fault or ""
        return self._faults[case]

    def _unseen(self) -> contextlib.AbstractContextManager[None]:
        """Hide the tiles from what keeps operators of the region's call, if it keeps any."""
        call = None if self._keeping is None else self._keeping.running
        return contextlib.nullcontext() if call is None else call.looking_away()

    def _keep(self) -> Callable[[int], Any] | None:
        """Return how the region's call that runs keeps the attention of a tile; None if it does not."""
        call = None if self._keeping is None else self._keeping.running
        return None if call is None else functools.partial(_keep_tile, call.of_tiles)

    def _note_unkept(self) -> None:
        """Tell the guard if the attention of a call should be kept in tiles, and is not."""
        call = None if self._keeping is None else self._keeping.running
        is_forward = graph_task_id() < 0
        if call is not None and is_forward and ATTENTION in self._policy.keep and not call.of_tiles.count:
            self._guard.note_unkept(self._ledger.name)

    def _tiles(self, hidden: torch.Tensor, module: nn.Module) -> int:
        policy = self._policy
        count = tile_count(hidden, module, policy.tile_tokens, policy.tile_shards, BLOCK_TILE_BYTES)
        is_given = policy.tile_tokens is not None or policy.tile_shards is not None
        return min(count, hidden.shape[1] if is_given else MOST_BLOCK_TILES, hidden.shape[1])

    def _refusal(self, module: nn.Module, reason: CannotCutError | str) -> NotTokenWiseError:
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


class _Ranks:
    """The ranks that meet in a block's collectives. All of them cut a call, into as many tiles, or none does."""

    def __init__(self, tiled: TiledFunction, groups: Sequence[Any], device: torch.device) -> None:
        partition = [partition_group(tiled)] if tiled.has_partitioned_weights() else []
        self._groups = [*partition, *groups]
        self._device = device
        self.have_begun = False
        """Whether they run tiles by now, and cannot agree to run the call whole instead."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, groups: Sequence[Any]) -> None:
        """Take in groups that a trial has found."""
        self._groups += [group for group in groups if group not in self._groups]

    def largest(self, *numbers: int) -> list[int]:
        """Return the largest of each number on all ranks."""
        return largest_of_each(self._groups, list(numbers), self._device)

    def agree(self, *statements: bool) -> list[bool]:
        """Tell which statements hold on all ranks; the first is that the call can be cut."""
        found = hold_on_all(self._groups, self._device, *statements)
        self.have_begun = found[0] and bool(self)
        return found


def _why_odd(named: Mapping[str, Any], length: int) -> str:
    """Return why one call cannot be cut, as far as its arguments and surroundings tell."""
    if "attentions" in recorded_outputs():
        return "output_attentions asks for its attention weights, which tiles would return in parts"
    try:
        BlockArguments(named, length)
    except OddCallError as reason:
        return str(reason)
    return ""


def _refuse_units(module: nn.Module, tiled: TiledFunction) -> None:
    """Refuse a block whose parts gather their weights by themselves, in hooks that each of its tiles would run.

    Ranks with other numbers of tiles would gather at other times, and wait for each other forever.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    sharded = tiled.fsdp_modules()
    for path, part in module.named_modules():
        if part in sharded or (part is not module and is_fsdp1(part)):
            kind = "FSDP2" if part in sharded else "FSDP1"
            raise CannotCutError(f"{kind} gathers the weights of its part {path!r} by themselves: shard whole blocks")


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
