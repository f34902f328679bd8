"""Uses TRL's fused kernel for log-probabilities, where it is installed and right for the case.

It folds each tile of logits into running sums in one pass. On devices without Triton it does the same with torch's
operators, which is slower than plain torch, so that it is only taken there if it is asked for by name.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Literal

import torch

from lowtide.errors import InvalidValueError

if TYPE_CHECKING:
    from lowtide.losses.tile_loss import LogProbOptions

Kernel = Literal["auto", "torch", "trl"]

_MODULE = "trl.kernels.chunked_logprob"
_CLASSES = 8192
"""Of how many classes at a time it computes logits: what TRL's own trainers use."""


def use_trl(kernel: Kernel, hidden: torch.Tensor) -> bool:
    """Return whether TRL's kernel computes these log-probabilities. Raise if it was asked for by name and cannot."""
    if kernel == "torch" or (kernel == "auto" and hidden.device.type not in ("cuda", "xpu")):
        return False
    reason = _why_not(hidden)
    if kernel == "trl" and reason is not None:
        raise InvalidValueError(f"kernel='trl' cannot compute these log-probabilities: {reason}. Use kernel='auto'")
    return reason is None


def _why_not(hidden: torch.Tensor) -> str | None:
    if hidden.dtype is torch.double:
        return "it computes in single precision, and the hidden states are torch.float64"
    if importlib.util.find_spec("trl") is None:
        return "trl is not installed"
    if importlib.util.find_spec(_MODULE) is None:
        return f"this version of trl has no {_MODULE}: it came with 1.16"
    return None


def trl_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    options: LogProbOptions,
    entropy: bool,
    _size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities, and entropies if asked, as TRL's kernel computes them."""
    kernel = importlib.import_module(_MODULE).ChunkedLogProbFunction
    valid = tokens != options.ignore_index
    log_probs, entropies, *_ = kernel.apply(
        hidden,
        weight,
        bias,
        tokens.masked_fill(~valid, 0),
        options.temperature,
        _CLASSES,
        options.logit_softcap,
        1.0 if options.logit_scale is None else options.logit_scale,
        ("entropy",) if entropy else (),
    )
    return log_probs.masked_fill(~valid, 0), None if entropies is None else entropies.masked_fill(~valid, 0)
