"""What the seam of an MLP or a mixture of experts does: run it in tiles, after a trial that it can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.applying.recorded import recorded_whole
from lowtide.errors import InvalidValueError
from lowtide.regions import listed_experts
from lowtide.slots import take_tensors
from lowtide.tiling.callee import Callee, is_in_pieces
from lowtide.tiling.function import tile_call
from lowtide.tiling.probe import check_token_wise
from lowtide.tiling.size import tile_count

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from lowtide.applying.handle import Applied
    from lowtide.measure import TileLedger
    from lowtide.policy import Policy


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
        callee = Callee(forward, module)
        tokens, shards = self._policy.tile_tokens, self._policy.tile_shards
        if module.training not in self._tried and self._is_to_be_tried(callee, x):
            self._check_gathers(module)
            check_token_wise(self._ledger.name, callee, args, kwargs, x.shape[:-1])
            self._tried.add(module.training)  # a norm over the batch acts in training only
        with recorded_whole(x.shape[:-1], self._ledger):
            return tile_call(callee, x, args, kwargs, self._ledger, tokens=tokens, shards=shards)

    def _check_gathers(self, module: nn.Module) -> None:
        """Ranks meet in ZeRO-3's gathers if they call the same experts: in a whole batch they may, in tiles hardly."""
        if any(is_in_pieces(weight) for expert in listed_experts(module) for weight in expert.parameters()):
            name, kind = self._ledger.name, type(module).__name__
            raise InvalidValueError(
                f"{name} ({kind}) cannot be tiled under ZeRO-3 as it is: its experts are gathered one by one, where a "
                f"tile needs them, and ranks need others. Have it gathered as a whole: "
                f"deepspeed.utils.set_z3_leaf_modules(model, [{kind}]) before deepspeed.initialize; or leave it out "
                f"with a rule: 'tile(mlp); {name}: none'"
            )

    def _is_to_be_tried(self, callee: Callee, x: torch.Tensor) -> bool:
        """Before it is cut for the first time; where a trial gathers weights, in the first call, as all ranks do."""
        tiles = tile_count(x, callee.module, self._policy.tile_tokens, self._policy.tile_shards)
        return tiles > 1 or bool(callee.units()) or callee.has_partitioned_weights()


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The first argument that holds features of tokens."""
    tensors, _ = take_tensors((args, kwargs))
    return next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1), None)
