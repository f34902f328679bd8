"""The loss of any head in tiles: a plain linear layer's by `linear_cross_entropy`, any other's by the tiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from lowtide.losses.function import linear_cross_entropy, tile_tokens
from lowtide.tiling.function import tile_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.losses.deferred import LossRequest
    from lowtide.measure import TileLedger


def head_loss(
    head: nn.Module,
    forward: Callable[..., Any],
    hidden: torch.Tensor,
    request: LossRequest,
    ledger: TileLedger,
    tokens: int | None,
) -> torch.Tensor:
    """What `cross_entropy` of the head's logits would give. `forward` is the head's own."""
    size = tile_tokens(count_classes(head), "auto" if tokens is None else tokens)
    labels = request.labels.reshape(hidden.shape[:-1]).to(hidden.device)
    if is_plain_linear(head, forward):
        ledger.calls += 1
        ledger.tiles += max(1, -(-labels.numel() // size))
        softcap, scale = request.after, request.before * (1.0 if request.after is None else request.after)
        return linear_cross_entropy(
            hidden,
            head.weight,  # type: ignore[arg-type]
            labels,
            bias=head.bias,  # type: ignore[arg-type]
            ignore_index=request.ignore_index,
            reduction=request.reduction,  # type: ignore[arg-type]
            label_smoothing=request.label_smoothing,
            logit_softcap=softcap,
            logit_scale=None if scale == 1 else scale,
            tokens=size,
        )

    def per_token(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = forward(hidden).float() * request.before
        if request.after is not None:
            logits = request.after * logits.tanh()
        return F.cross_entropy(
            logits,
            labels,
            ignore_index=request.ignore_index,
            reduction="none",
            label_smoothing=request.label_smoothing,
        )

    losses: torch.Tensor = tile_call(per_token, hidden, (hidden, labels), {}, ledger, tokens=size)
    if request.reduction == "none":
        return losses
    total = losses.sum()
    return total / (labels != request.ignore_index).sum().clamp(min=1) if request.reduction == "mean" else total


def count_classes(head: nn.Module) -> int:
    """How many logits a head makes of a token."""
    features = getattr(head, "out_features", None)
    return features if isinstance(features, int) else len(head.get_parameter("weight"))


def is_plain_linear(head: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a head is `hidden @ weight.T + bias` and nothing else: no adapter, no quantization, no other forward."""
    is_own = getattr(forward, "__func__", None) is nn.Linear.forward
    return is_own and type(getattr(head, "weight", None)) is nn.Parameter
