"""Attention of one tile's queries to the keys and values of all tokens, and the sums of those keys' gradients.

The keys and values of a block's call, K and V, are whole; queries come tile by tile. Each tile's backward has a part of
the gradient of every key that it saw. The parts are added up in float32, in place (`KeyValueGrads`): if autograd did
it, every part would be padded to the full length first, and summed in the type of the weights.

Where the sums go depends on the order of tiles. With causal attention a key is seen by its own tile and later ones.
Backward is made to run later tiles first, so when a tile's turn comes, the sums of its own rows are complete, and they
are the gradient of its own keys and values. Otherwise K and V have a graph of their own, and a node before all tiles
(`hand_out`) takes the sums when they are through.

With `create_graph=True` the parts are added up by autograd after all, because sums in place have no derivative.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import after_backward, graph_task_id
from lowtide.errors import LowtideError
from lowtide.tiling.attention_kernels import attend, attend_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.tiling.attention_kernels import Rows

    Compute = Callable[[], tuple[torch.Tensor, torch.Tensor]]
    Keep = Callable[[Compute, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Returns what a kernel returned in forward; given what computes it, and the query."""

ALL = slice(None)


class KeyValueGrads:
    """The gradients of K and V in one backward: number 0 and 1."""

    def __init__(self) -> None:
        self._backward = -1
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, which: int, shape: torch.Size, heads: slice, keys: slice, gradient: torch.Tensor) -> None:
        """Add the gradient of some heads and rows."""
        if self._backward != graph_task_id():
            self._sums = {}
            self._backward = graph_task_id()
            after_backward(self.forget)
        if which not in self._sums:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[which] = torch.zeros(shape, dtype=dtype, device=gradient.device)
        self._sums[which][:, heads, keys].add_(gradient)

    def rows(self, which: int, rows: slice, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the sums of a tile's own rows."""
        sums = self._sums.get(which)
        return None if sums is None else sums[:, :, rows].to(dtype)

    def take(self, which: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return all sums, and let go of them."""
        sums = self._sums.pop(which, None)
        return None if sums is None else sums.to(dtype)

    def forget(self) -> None:
        """Let go of all sums."""
        self._sums = {}
        self._backward = -1


# --- The nodes ------------------------------------------------------------------------------------------------------


def hand_out(grads: KeyValueGrads, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V for tiles that add their gradients to `grads`; in backward their own graph gets the sums."""
    return _HandOut.apply(grads, key, value)  # type: ignore[no-untyped-call, no-any-return]


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: KeyValueGrads, key: torch.Tensor, value: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.grads, ctx.dtypes = grads, (key.dtype, value.dtype)
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return None, *gradients
        return None, *(ctx.grads.take(which, dtype) for which, dtype in enumerate(ctx.dtypes))


def some_keys(grads: KeyValueGrads, which: int, keys: slice, whole: torch.Tensor) -> torch.Tensor:
    """Return the rows of K (0) or V (1) that a tile sees, for any attention function."""
    return _SomeKeys.apply(grads, which, keys, whole)  # type: ignore[no-untyped-call, no-any-return]


class _SomeKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: KeyValueGrads, which: int, keys: slice, whole: torch.Tensor) -> torch.Tensor:
        ctx.add = lambda gradient, shape=whole.shape: grads.add(which, shape, ALL, keys, gradient)
        ctx.around = (0, 0, keys.start, whole.shape[2] - keys.stop)
        return whole[:, :, keys]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: sums in place would be constants
            return None, None, None, nn.functional.pad(gradients[0], ctx.around)
        ctx.add(gradients[0])
        return None, None, None, None


def fused_attention(
    grads: KeyValueGrads,
    rows: Rows,
    keep: Keep | None,
    after: torch.Tensor | None,
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor] | None,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of a tile's queries to K and V by a fused kernel, and a token for the next tile.

    A `mask` is added to the scores of the keys that the rows see. With `own`, the tile's own keys and values, K and V
    are constants, and `own` gets the gradients of the tile's rows. `after` is the token of the tile before: in
    backward, that one's turn comes after this one's.
    """
    given = (None, None) if own is None else own
    return _FusedAttention.apply(grads, rows, keep, after, query, *given, key, value, mask)  # type: ignore[no-untyped-call, no-any-return]


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grads: KeyValueGrads,
        rows: Rows,
        keep: Keep | None,
        _after: torch.Tensor | None,
        query: torch.Tensor,
        own_key: torch.Tensor | None,
        _own_value: torch.Tensor | None,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> Any:
        compute = functools.partial(attend, query, key, value, rows, mask)
        out, row_sums = compute() if keep is None else keep(compute, query)
        ctx.save_for_backward(query, key, value, out, row_sums, mask)
        ctx.set_materialize_grads(False)
        ctx.grads, ctx.rows, ctx.is_in_order = grads, rows, own_key is not None
        return out, query.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, _token: None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: gradients that are constants would be silently wrong
            raise LowtideError(
                "attention in tiles by a fused kernel has no second derivative, as the kernel has none: with "
                "create_graph=True, use attn_implementation='eager', or take tile(attention) out of the policy"
            )
        query, key, value, out, row_sums, mask = ctx.saved_tensors
        needs = ctx.needs_input_grad[5:7] if ctx.is_in_order else ctx.needs_input_grad[7:9]
        dq = None if gradient is None else torch.zeros_like(query)
        given = (query, key, value, out, row_sums, ctx.rows, mask)
        pieces = () if gradient is None else attend_backward(gradient, *given)
        for heads, group, keys, (part, *of_keys) in pieces:
            dq[:, heads].add_(part)  # type: ignore[index]
            for which, of_key in enumerate(of_keys):
                if needs[which]:
                    ctx.grads.add(which, (key, value)[which].shape, group, keys, of_key)
        own = [None, None]
        if ctx.is_in_order:
            mine = slice(ctx.rows.start, ctx.rows.end)
            own = [ctx.grads.rows(which, mine, query.dtype) if needs[which] else None for which in (0, 1)]
            if ctx.rows.start == 0:  # the last of all tiles: nothing waits for backward's end, which is far away
                ctx.grads.forget()
        return None, None, None, None, dq, *own, None, None, None
