"""Computes the loss of any head in tiles: of a plain linear layer by `linear_cross_entropy`, of others by the tiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional as F

from lowtide._torch import parameters_of
from lowtide.errors import NoRegionError
from lowtide.losses.linear_cross_entropy import as_autocast_would, count_tiles, linear_cross_entropy, tile_tokens
from lowtide.losses.tile_loss import LossOptions
from lowtide.tiling.tile import tile_call
from lowtide.tiling.tiled_function import TiledFunction

if TYPE_CHECKING:
    import torch

    from lowtide.counters import TileLedger
    from lowtide.losses.deferred import LossRequest


def head_loss(
    tiled: TiledFunction, hidden: torch.Tensor, request: LossRequest, ledger: TileLedger, tokens: int | None
) -> torch.Tensor:
    """Return what `cross_entropy` of the head's logits would. The function of `tiled` is the head's own forward."""
    head: Any = tiled.module
    wanted = "auto" if tokens is None else tokens
    size = tile_tokens(count_classes(head), wanted)
    labels = request.labels.reshape(hidden.shape[:-1]).to(hidden.device)
    if _is_plain_linear(tiled):
        softcap, scale = request.after, request.before * (1.0 if request.after is None else request.after)
        options = LossOptions(logit_softcap=softcap, logit_scale=None if scale == 1 else scale)
        hidden, weight, bias = as_autocast_would(hidden, head.weight, _total_bias(head.bias, request.bias, head.weight))
        ledger.calls += 1
        ledger.tiles += count_tiles(hidden, size, wanted, options, request.reduction)
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=request.ignore_index,
            reduction=request.reduction,  # type: ignore[arg-type]
            label_smoothing=request.label_smoothing,
            logit_softcap=options.logit_softcap,
            logit_scale=options.logit_scale,
            tokens=wanted,
        )

    def per_token(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = tiled.function(hidden).float()
        if request.bias is not None:
            logits = logits + request.bias
        logits = logits * request.before
        if request.after is not None:
            logits = request.after * logits.tanh()
        return F.cross_entropy(
            logits,
            labels,
            ignore_index=request.ignore_index,
            reduction="none",
            label_smoothing=request.label_smoothing,
        )

    losses: torch.Tensor = tile_call(TiledFunction(per_token, head), hidden, (hidden, labels), {}, ledger, tokens=size)
    if request.reduction == "none":
        return losses
    total = losses.sum()
    return total / (labels != request.ignore_index).sum().clamp(min=1) if request.reduction == "mean" else total


def _total_bias(bias: torch.Tensor | None, extra: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if extra is None:
        return bias
    extra = extra.reshape(-1).to(like)
    return extra if bias is None else bias + extra


def count_classes(head: nn.Module) -> int:
    """Return how many logits a head computes per token, by its `out_features` or those of the linear layer in it."""
    if isinstance(head, nn.ModuleList | nn.ModuleDict):  # a container is never called
        raise NoRegionError(
            f"tile(loss): the model has {len(head)} heads, and only one head's loss can be tiled: leave tile(loss) "
            "out, and call lowtide.linear_cross_entropy where you compute the loss"
        )
    found = {module.out_features for module in head.modules() if isinstance(getattr(module, "out_features", None), int)}
    own = getattr(head, "out_features", None)
    if isinstance(own, int):
        return own
    if len(found) == 1:
        return int(found.pop())  # type: ignore[arg-type]
    weight = parameters_of(head).get("weight")
    if weight is None or weight.dim() != 2:  # noqa: PLR2004  ([classes, width])
        raise NoRegionError(
            f"tile(loss): the head is a {type(head).__name__}, which does not say how many logits it computes: leave "
            "tile(loss) out, and call lowtide.linear_cross_entropy where you compute the loss"
        )
    return len(weight)


def _is_plain_linear(tiled: TiledFunction) -> bool:
    """Return whether a head is `hidden @ weight.T + bias` only: no adapter, no quantization, no replaced forward."""
    is_own = getattr(tiled.function, "__func__", None) is nn.Linear.forward
    return is_own and type(getattr(tiled.module, "weight", None)) is nn.Parameter
