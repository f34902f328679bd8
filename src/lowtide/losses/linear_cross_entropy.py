"""`lowtide.linear_cross_entropy`, the public function: checks its arguments, chooses a tile size, applies autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional as F

from lowtide._torch import outside_graph
from lowtide.errors import InvalidValueError
from lowtide.losses.autograd import ReducedLoss, TokenLosses
from lowtide.losses.liger import use_liger
from lowtide.losses.tile_loss import LossOptions
from lowtide.tiling.surroundings import refuse_transforms
from lowtide.units import parse_tokens

if TYPE_CHECKING:
    from lowtide.losses.liger import Kernel
    from lowtide.losses.tile_loss import LogProbOptions

TILE_BYTES = 128 * 1024**2
"""The default tile has as many tokens as have logits of this size in single precision, ..."""

LEAST_TOKENS = 256
"""... but not fewer than this, because each tile reads the whole weight."""


@outside_graph
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    shift: bool = False,
    tokens: int | str = "auto",
    kernel: Kernel = "auto",
) -> torch.Tensor:
    """Compute the cross entropy of `hidden @ weight.T + bias` and `labels`; logits exist for one tile at a time.

    `hidden` is `[..., width]`, `weight` `[classes, width]`, `labels` `[...]`. `reduction` means what it means in
    `torch.nn.functional.cross_entropy`: a mean divides the sum over all valid tokens once by their number, and is 0
    (not NaN) with zero gradients if every label is ignored. The loss is single precision at least, also where `hidden`
    is 16 bits wide: torch's would be 16 bits wide, too. `logit_scale` multiplies the logits, then `logit_softcap`
    limits them (`softcap * tanh(logits / softcap)`). With `shift=True` each token is compared with the label after it.

    A mean or a sum costs the same three matrix products as the plain loss. Losses per token (`"none"`) cost one more in
    backward. Sums over tiles are kept in single precision.

    `kernel="auto"` takes Liger's fused kernel for a mean or a sum on CUDA if liger-kernel is installed, no tile size is
    given and there is neither a scale nor a softcap; else, or with `"torch"`, plain torch.
    """
    options = LossOptions(ignore_index, label_smoothing, logit_softcap, logit_scale)
    _check_words(reduction, tokens, kernel)
    _check_options(options)
    check_tensors(hidden, weight, labels, bias)
    refuse_transforms("linear_cross_entropy")
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    hidden, weight, bias = as_autocast_would(hidden, weight, bias)
    flat = hidden.reshape(-1, hidden.shape[-1])
    flat_labels = labels.reshape(-1).to(hidden.device, torch.int64)
    size = tile_tokens(weight.shape[0], tokens)
    if reduction == "none":
        return TokenLosses.apply(flat, weight, bias, flat_labels, options, size).view(labels.shape)  # type: ignore[no-any-return, no-untyped-call]
    fused = tokens == "auto" and use_liger(kernel, flat, options)
    return ReducedLoss.apply(flat, weight, bias, flat_labels, options, reduction, None if fused else size)  # type: ignore[no-any-return, no-untyped-call]


linear_cross_entropy.__module__ = "lowtide"


def tile_tokens(classes: int, tokens: int | str) -> int:
    """Return the tokens of a tile: as given, or from `TILE_BYTES`."""
    size = max(LEAST_TOKENS, TILE_BYTES // (4 * classes)) if tokens == "auto" else parse_tokens(tokens)
    if size < 1:
        raise InvalidValueError(f"a tile needs at least one token, got tokens={tokens!r}")
    return size


def count_tiles(hidden: torch.Tensor, size: int, tokens: int | str, options: LossOptions, reduction: str) -> int:
    """Return in how many tiles a loss is computed. A fused kernel makes its own tiles: that counts as one."""
    is_fused = tokens == "auto" and reduction != "none" and use_liger("auto", hidden, options)
    return 1 if is_fused else max(1, -(-hidden.shape[:-1].numel() // size))


def _check_words(reduction: str, tokens: int | str, kernel: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise InvalidValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if kernel not in ("auto", "torch", "liger"):
        raise InvalidValueError(f"kernel must be 'auto', 'torch' or 'liger', got {kernel!r}")
    if kernel == "liger" and (reduction == "none" or tokens != "auto"):
        raise InvalidValueError("kernel='liger' computes a mean or a sum, with its own tile size: leave tokens out")


def _check_options(options: LossOptions) -> None:
    check_numbers(options)
    if not 0 <= options.label_smoothing <= 1:
        raise InvalidValueError(f"label_smoothing must be between 0 and 1, got {options.label_smoothing}")


def check_numbers(options: LossOptions | LogProbOptions) -> None:
    """Refuse tensors among the settings of logits, and a softcap that is not positive."""
    for name, value in options._asdict().items():
        if isinstance(value, torch.Tensor):
            raise InvalidValueError(
                f"{name} must be a number: a tensor would get no gradient. Pass {name}.item(), or, for a learned "
                "scale, multiply the hidden states by it"
            )
    if options.logit_softcap is not None and options.logit_softcap <= 0:
        raise InvalidValueError(f"logit_softcap must be positive, got {options.logit_softcap}")


def check_tensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    labels_are: str = "labels",
) -> None:
    """Refuse shapes that do not belong together, and labels that are not class numbers."""
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:  # noqa: PLR2004  ([classes, width])
        raise InvalidValueError(
            f"hidden {tuple(hidden.shape)} does not fit weight {tuple(weight.shape)}: [..., width] and [classes, width]"
        )
    if labels.shape != hidden.shape[:-1]:
        raise InvalidValueError(
            f"{labels_are} {tuple(labels.shape)} must have one entry per token of {tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidValueError(f"bias {tuple(bias.shape)} must have one entry per class of {tuple(weight.shape)}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise InvalidValueError(f"{labels_are} must be class numbers (int64), got {labels.dtype}")


def as_autocast_would(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast the inputs as autocast would: it acts on operators, and does not see those inside a custom node."""
    kind = hidden.device.type
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if enabled and hidden.dtype is not torch.double:
        dtype = torch.get_autocast_dtype(kind)
        return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        types = f"hidden is {hidden.dtype}, weight {weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
        raise InvalidValueError(f"{types}: cast them to the same type")
    return hidden, weight, bias
