"""Uses Liger's fused kernel for the loss, where it is installed and right for the case.

The kernel computes the loss of a tile and the gradient of its logits in one pass. Only its forward is used: it returns
the gradients of the sum, and our own backward scales them, because Liger's multiplies its gradients in place, so that a
graph that is kept would be scaled twice.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any, Literal

import torch

from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from lowtide.losses.tile_loss import LossOptions

Kernel = Literal["auto", "torch", "liger"]


def use_liger(kernel: Kernel, hidden: torch.Tensor, options: LossOptions) -> bool:
    """Return whether Liger's kernel computes this loss. Raise if it was asked for by name and cannot."""
    if kernel == "torch":
        return False
    reason = _why_not(hidden, options)
    if kernel == "liger" and reason is not None:
        raise InvalidValueError(f"kernel='liger' cannot compute this loss: {reason}. Use kernel='auto'")
    return reason is None


def _why_not(hidden: torch.Tensor, options: LossOptions) -> str | None:
    if hidden.device.type != "cuda" and not (hidden.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"it runs on CUDA devices, and the hidden states are on {hidden.device}"
    if options.logit_scale is not None or options.logit_softcap is not None:
        return "it is not used for logits with a scale or a softcap"
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        return f"it is used for bfloat16 and float32, not for {hidden.dtype}"
    if not hidden.requires_grad:
        return "it computes no bias gradient if the hidden states do not need a gradient"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    return None


def liger_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: LossOptions,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the sum of the loss over all tokens, and its gradients for hidden states, weight and bias."""
    liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    leaves: list[Any] = [
        None if tensor is None else tensor.detach().requires_grad_(need)
        for tensor, need in zip((hidden, weight, bias), needs, strict=True)
    ]
    results = liger.fused_linear_cross_entropy_forward(
        _input=leaves[0],
        weight=leaves[1],
        target=labels,
        bias=leaves[2],
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="sum",
        accum_dtype=torch.float32,
    )
    gradients = list(results[-3:])
    return results[0], [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]
