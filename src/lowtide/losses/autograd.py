"""Computes the loss over all tokens tile by tile, as one node of the graph: a reduced loss, or one loss per token.

The gradient of a mean or a sum is known up to one factor as soon as the loss is computed. So the gradients of hidden
states and weight are both computed in forward, while a tile's logits are there, and backward only multiplies **both**
by the upstream gradient. Losses per token need an upstream gradient per token: their logits are computed again in
backward, tile by tile.

The gradients computed in forward are the sum's, also for a mean: its factor of 1 / tokens would underflow in half
precision before a loss scale could help. Sums over tokens stay in single precision until the factor is known, because
in half precision they would overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import keeps_graph
from lowtide.errors import LowtideError
from lowtide.losses.liger import liger_sum
from lowtide.losses.tile_loss import LossOptions, TileLoss

if TYPE_CHECKING:
    from collections.abc import Iterator


class HeadGradients:
    """Collects the gradients of hidden states, weight and bias; sums over tiles are kept in single precision."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._weight = weight
        self._dtype = weight.dtype
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None

    def add(self, rows: slice, hidden: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.hidden is not None:
            torch.mm(gradient, self._weight, out=self.hidden[rows])
        if self.weight is not None:
            if gradient.dtype == self.weight.dtype:
                torch.addmm(self.weight, gradient.t(), hidden, out=self.weight)
            else:
                self.weight.add_(gradient.t() @ hidden)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype))

    def sums(self) -> list[torch.Tensor | None]:
        """Return all three; those of weight and bias in single precision."""
        return [self.hidden, self.weight, self.bias]

    def cast(self) -> list[torch.Tensor | None]:
        """Return all three in the type of the tensors that they belong to."""
        return [None if gradient is None else gradient.to(self._dtype) for gradient in self.sums()]


def tile_rows(count: int, tokens: int) -> Iterator[slice]:
    """Yield the rows of each tile."""
    for start in range(0, count, tokens):
        yield slice(start, min(start + tokens, count))


def refuse_second_derivative(name: str) -> None:
    """Raise if gradients are about to be differentiated: as constants, they would be silently wrong."""
    if torch.is_grad_enabled():  # create_graph=True
        raise LowtideError(f"{name} has no second derivative: with create_graph=True, compute it from whole logits")


class ReducedLoss(torch.autograd.Function):
    """The sum or the mean over tokens, with gradients computed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        options: LossOptions,
        reduction: str,
        tokens: int | None,
    ) -> torch.Tensor:
        """Compute the loss; without a tile size (`tokens`), by the fused kernel, which chooses its own."""
        valid = (labels != options.ignore_index).sum().clamp(min=1)
        valid = valid.to(torch.promote_types(hidden.dtype, torch.float32))
        needs = ctx.needs_input_grad[:3]
        ctx.is_mean, ctx.dtype = reduction == "mean", hidden.dtype
        if tokens is None:
            total, found = liger_sum(hidden, weight, bias, labels, options, needs)
            ctx.save_for_backward(valid, *found)
            return total / valid if ctx.is_mean else total
        gradients = HeadGradients(hidden, weight, bias, needs)
        total = torch.zeros_like(valid)
        for rows in tile_rows(len(hidden), tokens):
            step = TileLoss(hidden[rows], weight, bias, labels[rows], options)
            total += step.losses.sum()
            if any(needs):
                gradients.add(rows, hidden[rows], step.logit_gradient(torch.ones_like(step.losses)))
            del step  # before the next tile's logits
        ctx.save_for_backward(valid, *(gradients.sums() if hidden.dtype is torch.float16 else gradients.cast()))
        return total / valid if ctx.is_mean else total

    @staticmethod
    def backward(ctx: Any, *upstreams: torch.Tensor) -> Any:
        refuse_second_derivative("linear_cross_entropy")
        (upstream,) = upstreams
        valid, *gradients = ctx.saved_tensors
        factor = upstream / valid if ctx.is_mean else upstream
        multiply = torch.Tensor.mul if keeps_graph() else torch.Tensor.mul_
        scaled = [None if gradient is None else multiply(gradient, factor) for gradient in gradients]
        return *[None if gradient is None else gradient.to(ctx.dtype) for gradient in scaled], *[None] * 4


class TokenLosses(torch.autograd.Function):
    """One loss per token; the logits are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        options: LossOptions,
        tokens: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.options, ctx.tokens = options, tokens
        losses = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for rows in tile_rows(len(hidden), tokens):
            losses[rows] = TileLoss(hidden[rows], weight, bias, labels[rows], options).losses
        return losses

    @staticmethod
    def backward(ctx: Any, *upstreams: torch.Tensor) -> Any:
        refuse_second_derivative("linear_cross_entropy")
        (upstream,) = upstreams
        hidden, weight, bias, labels = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for rows in tile_rows(len(hidden), ctx.tokens):
            step = TileLoss(hidden[rows], weight, bias, labels[rows], ctx.options)
            gradients.add(rows, hidden[rows], step.logit_gradient(upstream[rows]))
            del step  # before the next tile's logits
        return *gradients.cast(), *[None] * 3
