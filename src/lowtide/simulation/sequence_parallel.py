"""Models sequence parallelism as DeepSpeed Ulysses does it (`UlyssesSPAttentionHF`): a rank has a part of the tokens.

Around attention, ranks exchange: each gets all tokens of its share of the heads, and gives back its tokens of all
heads. Of keys and values with fewer heads than there are ranks, every rank gets one head, which is copied for it.
Queries, keys and values are exchanged one by one, laid out anew before and after, and so is what attention returns.

`divided_heads` takes the place of transformers' attention function, as DeepSpeed does.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import InvalidValueError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lowtide.policy import Policy
    from lowtide.simulation.collectives import Group

_FUNCTION = "sdpa"


def require_heads(model: nn.Module, ranks: int) -> None:
    """Refuse a model whose attention cannot be exchanged among this many ranks."""
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or getattr(text, "_attn_implementation", None) != _FUNCTION:
        raise PlanError(
            f"sp={ranks}: the attention of {name} is not transformers' {_FUNCTION!r}, where Ulysses takes its place: "
            "plan it without sp"
        )
    keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks:
        raise PlanError(
            f"sp={ranks}: {name} has {heads} attention heads, which cannot be divided among {ranks} ranks: plan it "
            f"with an sp that divides {heads}"
        )
    if keys % ranks and ranks % keys:
        raise PlanError(
            f"sp={ranks}: {name} has {keys} key value heads, which can neither be divided among {ranks} ranks nor "
            "copied to them: plan it with an sp that divides them, or is a multiple of them"
        )


def require_whole_attention(policy: Policy, name: str = "sp") -> None:
    """Refuse a policy that tiles attention, as applying it does where attention reaches other ranks."""
    if "attention" in policy.tile:
        raise InvalidValueError(
            f"tile(attention) with {name}: attention reaches the tokens of other ranks, and a tile would have those of "
            "its own rank alone. Leave attention out: tile(mlp, loss)"
        )


@contextlib.contextmanager
def divided_heads(group: Group) -> Iterator[None]:
    """Let transformers' attention run on all tokens of a share of the heads inside."""
    functions: Any = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    functions[_FUNCTION] = _Attention(functions[_FUNCTION], group)
    try:
        yield
    finally:
        del functions[_FUNCTION]


class _Attention:
    """An attention function of transformers with exchanges around it."""

    def __init__(self, attend: Callable[..., Any], group: Group) -> None:
        self._attend = attend
        self._group = group

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if mask is not None:
            raise PlanError(
                f"sp={self._group.ranks}: {type(module).__name__} attends under a mask (a window, or padding), which "
                "Ulysses does not exchange: plan it without sp"
            )
        positions = self._gather_positions(kwargs.pop("position_ids", None))
        groups = module.num_key_value_groups
        query, key, value = (self._exchange_heads(tensor) for tensor in (query, key, value))
        module.num_key_value_groups = query.shape[1] // key.shape[1]  # type: ignore[assignment]
        try:
            context, _ = self._attend(module, query, key, value, None, position_ids=positions, **kwargs)
        finally:
            module.num_key_value_groups = groups
        return self._exchange_tokens(context), None

    def _gather_positions(self, positions: torch.Tensor | None) -> torch.Tensor | None:
        if positions is None:
            return None
        with torch.no_grad():
            return torch.cat(self._group.all_gather(positions).chunk(self._group.ranks), dim=1)

    def _exchange_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give away this rank's tokens of other ranks' heads, for other ranks' tokens of its own heads."""
        ranks = self._group.ranks
        tensor = tensor.permute(2, 0, 1, 3)
        tokens, batch, heads, width = tensor.shape
        if heads < ranks:
            tensor = tensor.repeat_interleave(ranks // heads, dim=2)
            heads = ranks
        by_rank = tensor.reshape(tokens, batch, ranks, heads // ranks, width).permute(2, 0, 1, 3, 4).contiguous()
        received = self._group.exchange_first(by_rank).reshape(ranks * tokens, batch, heads // ranks, width)
        return received.permute(1, 2, 0, 3).contiguous()

    def _exchange_tokens(self, context: torch.Tensor) -> torch.Tensor:
        """Give away other ranks' tokens of this rank's heads, for its own tokens of all heads."""
        ranks = self._group.ranks
        batch, tokens, heads, width = context.shape
        by_rank = context.permute(1, 0, 2, 3).reshape(ranks, tokens // ranks, batch, heads * width).contiguous()
        received = self._group.exchange_first(by_rank).permute(1, 2, 0, 3)
        mine = received.reshape(tokens // ranks, batch, ranks * heads * width).contiguous()
        return mine.permute(1, 0, 2)
