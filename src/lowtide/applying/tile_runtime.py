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
from lowtide.tiling.collectives import has_several_ranks, is_distributed
from lowtide.tiling.hooks import HookWatch, inner_hooks, known_to_change
from lowtide.tiling.probe import Trial
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
        self._tried: dict[_Case, list[Any]] = {}
        """What the module was tried out as, and the groups of the collectives that were found in it."""
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
            return self._run(call, self._tried.get(case, []))
        self._check_gathers(module)
        refuse_transforms(self._ledger.name)  # in the trial it would look like a fault of the module
        if is_distributed(x):
            return self._run_distributed(call)
        if not self._probe:
            self._tried[case] = []
            return self._run(call, [])
        return self._try_out(call, case, hooks)

    def _try_out(self, call: _TiledCall, case: _Case, hooks: list[Hook]) -> Any:
        """Run the first call of its kind. Hooks that may change something are watched in the call, before the trial."""
        trial = Trial(self._ledger.name, call.tiled, call.args, call.kwargs, call.x.shape[:-1])
        changing = known_to_change(hooks)
        if len(changing) == len(hooks):
            self._judge(trial, changing, call, case)
            return self._run(call, self._tried.get(case, []))
        watch = HookWatch(hooks)
        before = Snapshot(call.tiled.module.modules())  # type: ignore[union-attr]  # hooks are in a module
        output, error = None, None
        try:
            with watch.watching():
                output = self._run(call, [])
        except Exception as failure:  # noqa: BLE001  (raised below, unless the trial can tell the reason)
            error = failure
        noted = before.noted(lambda *_: True)
        try:
            with noted.restored(self._ledger.name):  # the trial begins where the call began
                self._judge(trial, watch.changing, call, case)
        except NotTokenWiseError as refusal:
            noted.restore()
            raise refusal from error
        if error is not None:
            raise error
        return output

    def _run_distributed(self, call: _TiledCall) -> Any:
        """Run a call that is short enough to stay whole; refuse to cut a DTensor."""
        if self._is_cut(call):
            name = self._ledger.name
            raise InvalidValueError(
                f"{name} ({type(call.tiled.module).__name__}) cannot be tiled: its hidden states are a DTensor, of "
                "which each rank may have other tokens. Hand it plain tensors of all tokens (use_local_output=True in "
                f"the parallel plan), or leave it out with a rule: 'tile(mlp); {name}: none'"
            )
        return self._run(call, [])

    def _judge(self, trial: Trial, hooks: list[Hook], call: _TiledCall, case: _Case) -> None:
        """Run the trial, and refuse the module if it cannot be tiled and this call is, or other ranks depend on it."""
        fault, groups = trial.run(hooks)
        if not groups and not self._is_cut(call) and not _gathers(call):
            self._alone.add(case)
            return
        if fault is not None:
            raise trial.refuse(fault)
        self._tried[case] = groups

    def _run(self, call: _TiledCall, groups: list[Any]) -> Any:
        tokens, shards = self._policy.tile_tokens, self._policy.tile_shards
        with _joined_records(call.x.shape[:-1], self._ledger):
            return tile_call(
                call.tiled,
                call.x,
                call.args,
                call.kwargs,
                self._ledger,
                tokens=tokens,
                shards=shards,
                groups=groups,
            )

    def _is_time_to_try(self, call: _TiledCall, case: _Case) -> bool:
        """Return whether the module is about to be cut, or may meet other ranks: then all try it in the first call."""
        return self._is_cut(call) or _gathers(call) or (has_several_ranks() and case not in self._alone)

    def _is_cut(self, call: _TiledCall) -> bool:
        return tile_count(call.x, call.tiled.module, self._policy.tile_tokens, self._policy.tile_shards) > 1

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


def _gathers(call: _TiledCall) -> bool:
    return bool(call.tiled.fsdp_modules()) or call.tiled.has_partitioned_weights()


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the first argument that holds features of tokens."""
    tensors, _ = flatten((args, kwargs))
    return next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1), None)


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
