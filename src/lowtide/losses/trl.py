"""Uses TRL's fused kernel for log-probabilities, where it is installed and right for the case.

It folds each tile of logits into running sums in one pass. On devices without Triton it does the same with torch's
operators, which is slower than plain torch, so that it is only taken there if it is asked for by name.

Its running sums are NaN where a logit is minus infinity: entropies always, log-probabilities if a whole tile of classes
is excluded. A bias is how classes are excluded, and to look at its values would make the host wait for the device. So
it is never taken for a head with a bias, unless it is asked for by name; then the bias is looked at.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Literal

import torch

from lowtide.errors import InvalidValueError
from lowtide.losses.autograd import refuse_second_derivative

if TYPE_CHECKING:
    from lowtide.losses.tile_loss import LogProbOptions

Kernel = Literal["auto", "torch", "trl"]

_MODULE = "trl.kernels.chunked_logprob"
_CLASSES = 8192
"""Of how many classes at a time it computes logits: what TRL's own trainers use."""


def use_trl(kernel: Kernel, hidden: torch.Tensor, bias: torch.Tensor | None, options: LogProbOptions) -> bool:
    """Return whether TRL's kernel computes these log-probabilities. Raise if it was asked for by name and cannot."""
    if kernel == "torch":
        return False
    if kernel == "auto":
        return hidden.device.type in ("cuda", "xpu") and bias is None and _why_not(hidden) is None
    reason = _why_not(hidden) or _excluded_classes(bias, options)
    if reason is not None:
        raise InvalidValueError(f"kernel='trl' cannot compute these log-probabilities: {reason}. Use kernel='auto'")
    return True


def _why_not(hidden: torch.Tensor) -> str | None:
    if hidden.dtype is torch.double:
        return "it computes in single precision, and the hidden states are torch.float64"
    if importlib.util.find_spec("trl") is None:
        return "trl is not installed"
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (_MODULE, _MODULE.rpartition(".")[0]):
            return f"this version of trl has no {_MODULE}: it came with 1.16"
        return f"trl cannot be imported: {error}"
    return None


def _excluded_classes(bias: torch.Tensor | None, options: LogProbOptions) -> str | None:
    """Say so if the bias excludes classes. With a softcap, their logits are finite."""
    if bias is None or options.logit_softcap is not None or not bias.isneginf().any():
        return None
    return "its sums are NaN for logits of minus infinity, which the bias has"


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
    if log_probs.grad_fn is not None:
        log_probs.grad_fn.register_prehook(lambda _gradients: refuse_second_derivative("linear_log_probs"))
    return log_probs.masked_fill(~valid, 0), None if entropies is None else entropies.masked_fill(~valid, 0)
