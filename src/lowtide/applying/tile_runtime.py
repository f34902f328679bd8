"""What the seam of an MLP or a mixture of experts does: run it in tiles, after a trial that it can be.

transformers records outputs of some modules, such as a router's logits: its hooks append each output to a list while a
model's forward runs. A router inside a tiled mixture of experts is called once per tile, and a router's loss that masks
padding needs the logits of all tokens in one piece. So what the tiles of one call record is joined to one entry.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from lowtide.compat import recorded_outputs
from lowtide.errors import InvalidValueError
from lowtide.regions import listed_experts
from lowtide.tensor_tree import flatten
from lowtide.tiling.probe import check_token_wise
from lowtide.tiling.surroundings import refuse_transforms
from lowtide.tiling.tile import tile_call, tile_count
from lowtide.tiling.tiled_function import TiledFunction, is_zero3_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lowtide.counters import TileLedger
    from lowtide.policy import Policy


class TileRuntime:
    """Runs one module in tiles. With `probe=False`, it is taken for token-wise without a trial."""

    def __init__(self, policy: Policy, ledger: TileLedger, *, probe: bool) -> None:
        self._policy = policy
        self._ledger = ledger
        self._probe = probe
        self._tried: set[bool] = set()
        """The modes, training or not, that the module was tried out in."""

    def is_active(self, module: nn.Module) -> bool:  # noqa: ARG002  (in training or not)
        """Return True: a long forward without gradients has intermediates, too."""
        return True

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward in tiles of tokens; plainly if no argument has tokens."""
        x = _hidden_states(args, kwargs)
        if x is None:
            return forward(*args, **kwargs)
        tiled = TiledFunction(forward, module)
        if module.training not in self._tried and self._is_time_to_try(tiled, x):
            self._check_gathers(module)
            refuse_transforms(self._ledger.name)  # in the trial it would look like a fault of the module
            if self._probe:
                check_token_wise(self._ledger.name, tiled, args, kwargs, x.shape[:-1])
            self._tried.add(module.training)  # a norm over the batch acts in training only
        tokens, shards = self._policy.tile_tokens, self._policy.tile_shards
        with _joined_records(x.shape[:-1], self._ledger):
            return tile_call(tiled, x, args, kwargs, self._ledger, tokens=tokens, shards=shards)

    def _is_time_to_try(self, tiled: TiledFunction, x: torch.Tensor) -> bool:
        """Return whether the module is about to be cut, or gathers weights: then all ranks try it in the first call."""
        tiles = tile_count(x, tiled.module, self._policy.tile_tokens, self._policy.tile_shards)
        return tiles > 1 or bool(tiled.fsdp_modules()) or tiled.has_partitioned_weights()

    def _check_gathers(self, module: nn.Module) -> None:
        """Refuse experts that ZeRO-3 gathers one by one.

        Ranks meet in these gathers only if they call the same experts: in a whole batch they may, in tiles hardly.
        """
        if any(is_zero3_sharded(weight) for expert in listed_experts(module) for weight in expert.parameters()):
            name, kind = self._ledger.name, type(module).__name__
            raise InvalidValueError(
                f"{name} ({kind}) cannot be tiled under ZeRO-3 as it is: its experts are gathered one by one, where a "
                f"tile needs them, and ranks need different ones. Have it gathered as a whole: "
                f"deepspeed.utils.set_z3_leaf_modules(model, [{kind}]) before deepspeed.initialize; or leave it out "
                f"with a rule: 'tile(mlp); {name}: none'"
            )


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
