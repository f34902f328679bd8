"""What transformers records inside a tiled module, such as a router's logits: one entry per call, not one per tile.

Its hooks append each output of a module to a list while a model's forward runs; a router inside a tiled mixture of
experts is called once per tile. A router's loss that masks padding needs the logits of all tokens in one piece.

What the seam of an MLP or a mixture of experts does: run it in tiles, after a trial that it can be.
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
from lowtide.tiling.tile import tile_call, tile_count
from lowtide.tiling.tiled_function import TiledFunction, is_zero3_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lowtide.applying.applied import Applied
    from lowtide.counters import TileLedger
    from lowtide.policy import Policy


@contextlib.contextmanager
def recorded_whole(lead: torch.Size, ledger: TileLedger) -> Iterator[None]:
    """Entries that the tiles of this call add are joined. `lead` are the dimensions of the call's tokens."""
    records = recorded_outputs()
    counts = {key: len(entries) for key, entries in records.items() if isinstance(entries, list)}
    tiles = ledger.tiles
    yield
    tiles = ledger.tiles - tiles
    for key, count in counts.items():
        added = records[key][count:]
        if tiles > 1 and len(added) > 1 and len(added) % tiles == 0:
            per_tile = len(added) // tiles
            records[key][count:] = [_joined(added[first::per_tile], lead) for first in range(per_tile)]


def _joined(parts: list[Any], lead: torch.Size) -> Any:
    has_batch = len(lead) > 1 and parts[0].dim() > len(lead) and parts[0].shape[0] == 1
    if not has_batch:
        return torch.cat(parts)
    whole = torch.cat(parts, dim=1)
    return whole.reshape(*lead, *whole.shape[2:])


class TileRuntime:
    """Tiles one module."""

    def __init__(self, policy: Policy, ledger: TileLedger, owner: Applied) -> None:
        self._policy = policy
        self._ledger = ledger
        self._tried: set[bool] = set()
        self.owner = owner

    def is_active(self, module: nn.Module) -> bool:  # noqa: ARG002  (in training or not)
        """Always: a long forward without gradients has intermediates too."""
        return True

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = _hidden_states(args, kwargs)
        if x is None:
            return forward(*args, **kwargs)
        tiled = TiledFunction(forward, module)
        tokens, shards = self._policy.tile_tokens, self._policy.tile_shards
        if module.training not in self._tried and self._is_to_be_tried(tiled, x):
            self._check_gathers(module)
            check_token_wise(self._ledger.name, tiled, args, kwargs, x.shape[:-1])
            self._tried.add(module.training)  # a norm over the batch acts in training only
        with recorded_whole(x.shape[:-1], self._ledger):
            return tile_call(tiled, x, args, kwargs, self._ledger, tokens=tokens, shards=shards)

    def _check_gathers(self, module: nn.Module) -> None:
        """Ranks meet in ZeRO-3's gathers if they call the same experts: in a whole batch they may, in tiles hardly."""
        if any(is_zero3_sharded(weight) for expert in listed_experts(module) for weight in expert.parameters()):
            name, kind = self._ledger.name, type(module).__name__
            raise InvalidValueError(
                f"{name} ({kind}) cannot be tiled under ZeRO-3 as it is: its experts are gathered one by one, where a "
                f"tile needs them, and ranks need others. Have it gathered as a whole: "
                f"deepspeed.utils.set_z3_leaf_modules(model, [{kind}]) before deepspeed.initialize; or leave it out "
                f"with a rule: 'tile(mlp); {name}: none'"
            )

    def _is_to_be_tried(self, tiled: TiledFunction, x: torch.Tensor) -> bool:
        """Before it is cut for the first time; where a trial gathers weights, in the first call, as all ranks do."""
        tiles = tile_count(x, tiled.module, self._policy.tile_tokens, self._policy.tile_shards)
        return tiles > 1 or bool(tiled.fsdp_modules()) or tiled.has_partitioned_weights()


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The first argument that holds features of tokens."""
    tensors, _ = flatten((args, kwargs))
    return next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1), None)
