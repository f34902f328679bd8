"""Models the head that TRL gives a causal language model (1.16): log-probabilities in chunks, and no logits.

`SFTTrainer` replaces the model's forward. The new one runs the backbone, chooses the hidden states whose next token has
a label, and multiplies them with the head's weight chunk by chunk, into one buffer in the weights' type. A kernel folds
each chunk into a few numbers per token in single precision. Backward computes each chunk again, turns it into the
gradient of its logits where it lies, and adds up the gradients of hidden states and weight in float32. The head itself
is never called, so that there is nothing for `tile(loss)` to tile, and `apply` refuses it.

Everything here is about sizes: tensors have no values. Kernels that read or overwrite the buffer are stood for by
operations that do the same and allocate nothing, as Triton's kernels do on a GPU.
Source: `add_fused_lm_head` in trl/trainer/utils.py, and trl/kernels/chunked_logprob.py.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import NoRegionError, PlanError
from lowtide.regions import find_head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_TOKENS, _CLASSES = 4096, 32768
"""Tokens and classes of a chunk."""

_IGNORED = -100

_SUMS = 7
"""Numbers per token that chunks are folded into: the largest, four sums, the largest before the target, the target."""


def require_chunked_head(model: nn.Module) -> None:
    """Refuse a model to which TRL's trainers give no such head."""
    config = getattr(model, "config", None)
    try:
        found = find_head(model)
    except NoRegionError as error:
        raise PlanError(_refusal(model, "it has no head that makes logits of tokens")) from error
    if getattr(config, "is_encoder_decoder", False):
        raise PlanError(_refusal(model, "it is an encoder and a decoder"))
    if not isinstance(getattr(found.module, "weight", None), torch.Tensor):
        raise PlanError(_refusal(model, f"its head {found.name!r} has no weight of its own"))
    if getattr(_text_config(found.model), "output_router_logits", False):
        raise PlanError(_refusal(model, "its configuration asks for a loss of routers (output_router_logits)"))


def _refusal(model: nn.Module, reason: str) -> str:
    return (
        f"trainer='trl' is the step of TRL's SFTTrainer with a causal language model, and of {type(model).__name__} it "
        f"is not modelled: {reason}. Plan it without trainer"
    )


def _text_config(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def give_chunked_head(model: nn.Module) -> None:
    """Replace the forward of the model that has the head; a simulated model lives for one step."""
    inner: Any = find_head(model).model

    @functools.wraps(type(inner).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = True, labels: torch.Tensor, **kwargs: Any) -> Any:
        del fused_lm_head
        backbone = self.base_model(*args, **{**kwargs, "use_cache": False})
        hidden, labels = backbone.last_hidden_state[:, :-1], labels[:, 1:]
        head, valid = self.get_output_embeddings(), labels != _IGNORED
        chosen = (hidden[valid], head.weight, head.bias, labels[valid])
        found = _Chunked.apply(*chosen)  # type: ignore[no-untyped-call]
        log_probs, entropy, is_top = (each.new_zeros(valid.shape).masked_scatter(valid, each) for each in found)
        loss = -log_probs.sum() / valid.sum().clamp(min=1)
        return types.SimpleNamespace(loss=loss, log_probs=log_probs, entropy=entropy, is_top=is_top, mask=valid)

    inner.forward = types.MethodType(forward, inner)


class _Chunked(torch.autograd.Function):
    """Log-probabilities, entropies and hits of the chosen tokens, and the gradients of the log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        sums = [hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(_SUMS)]
        for rows, _, chunk in _chunks(hidden, weight, bias):
            torch.sum(chunk, 1, dtype=torch.float32, out=sums[0][rows])
        normalizer = sums[0] + torch.log(sums[1])
        log_probs = sums[6] - normalizer
        entropy = normalizer - sums[2] / sums[1]
        is_top = (sums[6] >= sums[0]) & (sums[6] > sums[5])
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.mark_non_differentiable(is_top)
        return log_probs, entropy, is_top

    @staticmethod
    def backward(ctx: Any, *upstreams: torch.Tensor | None) -> Any:
        hidden, weight, bias, *_ = ctx.saved_tensors
        upstreams = tuple(None if upstream is None else upstream.contiguous() for upstream in upstreams[:2])
        wanted = zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        of_hidden, of_weight, of_bias = (
            torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            if is_needed and tensor is not None
            else None
            for tensor, is_needed in wanted
        )
        for rows, classes, chunk in _chunks(hidden, weight, bias):
            chunk.mul_(1)  # the kernel overwrites logits with their gradient, and products add up in float32
            if of_hidden is not None:
                torch.addmm(of_hidden[rows], chunk, weight[classes], out=of_hidden[rows])
            if of_weight is not None:
                torch.addmm(of_weight[classes], chunk.t(), hidden[rows], out=of_weight[classes])
            if of_bias is not None:
                of_bias[classes] += chunk.sum(0, dtype=torch.float32)
        found = zip((of_hidden, of_weight, of_bias), (hidden, weight, bias), strict=True)
        return *(None if gradient is None else gradient.to(like.dtype) for gradient, like in found), None


def _chunks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield the tokens and classes of each chunk, with their logits, which all lie in one buffer."""
    buffer = hidden.new_empty(min(len(hidden), _TOKENS), _CLASSES)
    for token in range(0, len(hidden), _TOKENS):
        rows = slice(token, min(token + _TOKENS, len(hidden)))
        for first in range(0, len(weight), _CLASSES):
            classes = slice(first, min(first + _CLASSES, len(weight)))
            chunk = buffer[: rows.stop - rows.start, : classes.stop - classes.start]
            torch.mm(hidden[rows], weight[classes].t(), out=chunk)
            if bias is not None:
                chunk.add_(bias[classes])
            yield rows, classes, chunk
