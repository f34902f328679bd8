"""Computes one tile: its losses from hidden states, and the gradient of its logits.

All of it is in single precision (double for doubles), on one buffer of the size of the tile's logits:

    z = hidden @ weight.T + bias        v = softcap * tanh(scale * z / softcap)
    loss = log(sum(exp(v))) - (1 - s) * v[label] - s * mean(v)        s: label smoothing
    d loss / d v = softmax(v) - (1 - s) * one_hot(label) - s / classes
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F


class LossOptions(NamedTuple):
    """The settings that turn logits into losses."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_softcap: float | None = None
    logit_scale: float | None = None


class LogProbOptions(NamedTuple):
    """The settings that turn logits into log-probabilities."""

    ignore_index: int = -100
    temperature: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float | None = None


class TileLogits:
    """The logits of a tile, scaled and limited, in single precision; and the way back from their gradient."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        scale: float | None,
        softcap: float | None,
    ) -> None:
        self._dtype = hidden.dtype
        self._scale = scale
        logits = F.linear(hidden, weight, bias)
        values = logits if logits.dtype is torch.double else logits.float()
        del logits
        if scale is not None:
            values.mul_(scale)
        self._tanh: torch.Tensor | None = None
        if softcap is not None:
            self._tanh = values.div_(softcap).tanh_()
            values = self._tanh * softcap
        self._values: torch.Tensor | None = values

    def take(self) -> torch.Tensor:
        """Return the values, which the caller may overwrite. Call it once."""
        values, self._values = self._values, None
        assert values is not None  # noqa: S101  (they are taken once)
        return values

    def gradient(self, of_values: torch.Tensor, upstream: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient of what the head computed: `of_values`, overwritten, times one upstream per row."""
        if self._tanh is not None:
            of_values.mul_(self._tanh.square_().neg_().add_(1))
        if upstream is None:
            return (of_values if self._scale is None else of_values.mul_(self._scale)).to(self._dtype)
        factor = upstream if self._scale is None else upstream * self._scale
        return of_values.mul_(factor.unsqueeze(1)).to(self._dtype)


class TileLoss:
    """The losses of a tile's tokens, and the buffer that becomes the gradient of its logits."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        options: LossOptions,
    ) -> None:
        self._smoothing = options.label_smoothing
        self._valid = labels != options.ignore_index
        self._labels = labels.masked_fill(~self._valid, 0).unsqueeze(1)
        self._logits = TileLogits(hidden, weight, bias, scale=options.logit_scale, softcap=options.logit_softcap)
        self.losses = self._losses_and_exponentials(self._logits.take())

    def _losses_and_exponentials(self, values: torch.Tensor) -> torch.Tensor:
        """Return the losses; `values` is overwritten with its exponentials, up to a factor."""
        smoothing = self._smoothing
        target = values.gather(1, self._labels).squeeze(1)
        if smoothing:
            target = (1 - smoothing) * target + smoothing * values.mean(1)
        largest = values.amax(1, keepdim=True)
        self._exponentials = values.sub_(largest).exp_()
        self._sums = self._exponentials.sum(1, keepdim=True)
        return torch.where(self._valid, self._sums.log().add_(largest).squeeze(1) - target, 0)

    def logit_gradient(self, upstream: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits for one upstream gradient per token. Uses up the buffer: call it once."""
        gradient = self._exponentials.div_(self._sums)
        on_target = torch.full_like(self._sums, self._smoothing - 1)
        gradient.scatter_add_(1, self._labels, on_target)
        if self._smoothing:
            gradient.sub_(self._smoothing / gradient.shape[1])
        return self._logits.gradient(gradient, torch.where(self._valid, upstream.to(gradient.dtype), 0))
