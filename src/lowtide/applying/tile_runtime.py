"""What the seam of an MLP or a mixture of experts does: run it in tiles, after a trial that it can be.

transformers records outputs of some modules, such as a router's logits: its hooks append each output to a list while a
model's forward runs. A router inside a tiled mixture of experts is called once per tile, and a router's loss that masks
padding needs the logits of all tokens in one piece. So what the tiles of one call record is joined to one entry.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide.buffers import Snapshot
from lowtide.compat import recorded_outputs
from lowtide.errors import InvalidValueError, NotTokenWiseError
from lowtide.regions import listed_experts
from lowtide.tensor_tree import flatten
from lowtide.tiling.collectives import has_several_ranks
from lowtide.tiling.hooks import HookWatch, inner_hooks, known_to_change
from lowtide.tiling.probe import Trial
from lowtide.tiling.spread_tokens import Spread, hidden_index, spread_function, spread_of
from lowtide.tiling.surroundings import refuse_transforms
from lowtide.tiling.tile import tile_call, tile_count
from lowtide.tiling.tiled_function import TiledFunction
from lowtide.weights import is_fsdp1, is_zero3_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lowtide.counters import TileLedger
    from lowtide.policy import Policy
    from lowtide.tiling.hooks import Hook


class TileRuntime:
    """Runs one module in tiles. With `probe=False`, it is taken for token-wise without a trial."""

    def __init__(self, policy: Policy, ledger: TileLedger, *, probe: bool) -> None:
        self._policy = policy
        self._ledger = ledger
        self._probe = probe
        self._tried: dict[_Case, _Verdict] = {}
        """What the module was tried out as, and what was found."""
        self.suspended = 0
        """How many tiles of the block around it run right now: what is in a tile is not cut again."""
        self._alone: set[_Case] = set()
        """What it was tried out as in a call that is not cut, and met no other rank: a longer call will try again."""

    def is_active(self, module: nn.Module) -> bool:  # noqa: ARG002  (in training or not)
        """Return whether it is not in a tile already. A long forward without gradients has intermediates, too."""
        return not self.suspended

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward in tiles of tokens; plainly if no argument has tokens."""
        x = _hidden_states(args, kwargs)
        if x is None:
            return forward(*args, **kwargs)
        call = _TiledCall(TiledFunction(forward, module), x, args, kwargs)
        hooks = inner_hooks(module)
        case = _Case(module.training, frozenset(hook.kind for hook in hooks))
        if case in self._tried or not self._is_time_to_try(call, case):
            return self._run(call, self._tried.get(case, _UNKNOWN))
        self._check_gathers(module)
        refuse_transforms(self._ledger.name)  # in the trial it would look like a fault of the module
        if not self._probe:
            self._tried[case] = _UNKNOWN
            return self._run(call, _UNKNOWN)
        return self._try_out(call, case, hooks)

    def _try_out(self, call: _TiledCall, case: _Case, hooks: list[Hook]) -> Any:
        """Run the first call of its kind. Hooks that may change something are watched in the call, before the trial."""
        changing = known_to_change(hooks)
        spread = spread_of(call.x)
        if spread is None:  # it is too short to be cut, or refused
            return self._run(call, _UNKNOWN)
        trial = self._trial(call, spread)
        if len(changing) == len(hooks):
            self._judge(trial, spread, changing, call, case)
            return self._run(call, self._tried.get(case, _UNKNOWN))
        watch = HookWatch(hooks)
        before = Snapshot(call.tiled.module.modules())  # type: ignore[union-attr]  # hooks are in a module
        output, error = None, None
        try:
            with watch.watching():
                output = self._run(call, _UNKNOWN)
        except Exception as failure:  # noqa: BLE001  (raised below, unless the trial can tell the reason)
            error = failure
        noted = before.noted(lambda *_: True)
        try:
            with noted.restored():  # the trial begins where the call began
                self._judge(trial, spread, watch.changing, call, case)
        except (NotTokenWiseError, InvalidValueError) as refusal:
            noted.restore()
            raise refusal from error
        if error is not None:
            raise error
        return output

    def _judge(self, trial: Trial, spread: Spread, hooks: list[Hook], call: _TiledCall, case: _Case) -> None:
        """Run the trial, and refuse the module if it cannot be tiled and this call is, or other ranks depend on it.

        With collectives inside, it may return only this rank's part of the tokens: then it is tried out as such.
        """
        fault, groups, lacks_rows = trial.run(hooks)
        if not groups and not self._is_cut(call) and not _gathers(call):
            self._alone.add(case)
            return
        parts = 1
        if fault is not None:
            scattered = spread.scattered(groups, call.x) if groups and lacks_rows else None
            if scattered is None and lacks_rows and len(groups) == 1 and call.x.shape[-2] % groups[0].size():
                raise self._uneven(call, groups[0].size())
            if scattered is None or self._trial(call, scattered).run(hooks).fault is not None:
                raise trial.refuse(fault)
            parts = scattered.parts
        self._tried[case] = _Verdict(groups, parts)

    def _trial(self, call: _TiledCall, spread: Spread) -> Trial:
        call = call.of_rows(spread)
        return Trial(self._ledger.name, call.tiled, call.args, call.kwargs, call.x.shape[:-1])

    def _run(self, call: _TiledCall, verdict: _Verdict) -> Any:
        tiles = self._tile_count(call)
        spread = Spread() if tiles == 1 else spread_of(call.x, verdict.parts)
        if spread is None:
            raise self._uneven(call, verdict.parts)
        rows = call.of_rows(spread)
        with _joined_records(rows.x.shape[:-1], self._ledger):
            output = tile_call(
                rows.tiled, rows.x, rows.args, rows.kwargs, self._ledger, shards=tiles, groups=verdict.groups
            )
        return output if spread.is_whole else spread.whole(output)

    def _is_time_to_try(self, call: _TiledCall, case: _Case) -> bool:
        """Return whether the module is about to be cut, or may meet other ranks: then all try it in the first call."""
        return self._is_cut(call) or _gathers(call) or (has_several_ranks() and case not in self._alone)

    def _is_cut(self, call: _TiledCall) -> bool:
        return self._tile_count(call) > 1

    def _tile_count(self, call: _TiledCall) -> int:
        return tile_count(call.x, call.tiled.module, self._policy.tile_tokens, self._policy.tile_shards)

    def _uneven(self, call: _TiledCall, parts: int) -> InvalidValueError:
        name = self._ledger.name
        what = f"its hidden states are {type(call.x).__name__} of shape {tuple(call.x.shape)}"
        if parts > 1:
            what = f"a part of its output, which has {call.x.shape[-2]} tokens, goes to each of {parts} ranks"
        return InvalidValueError(
            f"{name} ({type(call.tiled.module).__name__}) cannot be tiled: {what}, and the ranks' parts are not of one "
            f"size. Pad the sequence to a multiple of the ranks, or leave it out with a rule: 'tile(mlp); {name}: none'"
        )

    def _check_gathers(self, module: nn.Module) -> None:
        """Refuse parts that are gathered one by one, where ranks would have to call the same ones in the same order.

        ZeRO-3's ranks meet in the gathers of experts: in a whole batch they may, in tiles hardly. FSDP1 gathers in a
        wrapper around a part, and lays out its weights as one.
        """
        name, kind = self._ledger.name, type(module).__name__
        leave_out = f"or leave it out with a rule: 'tile(mlp); {name}: none'"
        if any(is_zero3_sharded(weight) for expert in listed_experts(module) for weight in expert.parameters()):
            raise InvalidValueError(
                f"{name} ({kind}) cannot be tiled under ZeRO-3 as it is: its experts are gathered one by one, where a "
                f"tile needs them, and ranks need different ones. Have it gathered as a whole: "
                f"deepspeed.utils.set_z3_leaf_modules(model, [{kind}]) before deepspeed.initialize; {leave_out}"
            )
        if unit := next((path for path, part in module.named_modules() if part is not module and is_fsdp1(part)), None):
            raise InvalidValueError(
                f"{name} ({kind}) cannot be tiled: FSDP1 gathers the weights of {name}.{unit} by themselves, which a "
                f"tile cannot see. Wrap whole layers instead of parts of an MLP, use FSDP2 (fully_shard), {leave_out}"
            )


class _Verdict(NamedTuple):
    """What a trial found: the groups of the collectives inside, and how many ranks get a part of the output each."""

    groups: list[Any]
    parts: int = 1


_UNKNOWN = _Verdict([])


class _Case(NamedTuple):
    """What a trial holds for: a norm over the batch acts in training only, and hooks may come and go."""

    is_training: bool
    hooks: frozenset[tuple[str, object]]


class _TiledCall(NamedTuple):
    """One call of a module, and the hidden states among its arguments."""

    tiled: TiledFunction
    x: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of_rows(self, spread: Spread) -> _TiledCall:
        """Return the call as one of a function of plain rows, if its tokens are spread over ranks."""
        if spread.is_whole:
            return self
        rows = spread.rows(self.x)
        tensors, tree = flatten((self.args, self.kwargs))
        args, kwargs = tree.unflatten([rows if tensor is self.x else tensor for tensor in tensors])
        return _TiledCall(spread_function(spread, self.tiled.function, self.tiled.module), rows, args, kwargs)  # type: ignore[arg-type]


def _gathers(call: _TiledCall) -> bool:
    return bool(call.tiled.fsdp_modules()) or call.tiled.has_partitioned_weights()


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the first argument that holds features of tokens."""
    tensors, _ = flatten((args, kwargs))
    index = hidden_index(tensors)
    return None if index is None else tensors[index]


@contextlib.contextmanager
def _joined_records(lead: torch.Size, ledger: TileLedger) -> Iterator[None]:
    """Join what the tiles inside add to transformers' records. `lead` are the dimensions of the call's tokens."""
    records = recorded_outputs()
    counts = {key: len(entries) for key, entries in records.items() if isinstance(entries, list)}
    tiles_before = ledger.tiles
    yield
    tiles = ledger.tiles - tiles_before
    for key, count in counts.items():
        added = records[key][count:]
        if tiles > 1 and len(added) > 1 and len(added) % tiles == 0:
            per_tile = len(added) // tiles
            records[key][count:] = [_join(added[first::per_tile], lead) for first in range(per_tile)]


def _join(parts: list[Any], lead: torch.Size) -> Any:
    has_batch = len(lead) > 1 and parts[0].dim() > len(lead) and parts[0].shape[0] == 1
    if not has_batch:
        return torch.cat(parts)
    joined = torch.cat(parts, dim=1)
    return joined.reshape(*lead, *joined.shape[2:])
