"""`lowtide.linear_log_probs`: log-probabilities of chosen tokens, and entropies, from tiles of logits.

For a tile's logits v, scaled, limited and divided by the temperature, and p = softmax(v):

    log_prob = v[token] - log(sum(exp(v)))      d log_prob / d v = one_hot(token) - p
    entropy = -sum(p * log(p))                  d entropy / d v = -p * (log(p) + entropy)

Both need an upstream gradient per token, so that the logits are computed again in backward, tile by tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lowtide._torch import outside_graph
from lowtide.errors import InvalidValueError
from lowtide.losses.autograd import HeadGradients, refuse_second_derivative, tile_rows
from lowtide.losses.linear_cross_entropy import as_autocast_would, check_numbers, check_tensors, tile_tokens
from lowtide.losses.tile_loss import LogProbOptions, TileLogits
from lowtide.losses.trl import trl_log_probs, use_trl
from lowtide.tiling.surroundings import refuse_transforms

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.losses.trl import Kernel


@overload
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = ...,
    temperature: float = ...,
    logit_softcap: float | None = ...,
    logit_scale: float | None = ...,
    entropy: Literal[False] = ...,
    ignore_index: int = ...,
    tile: int | str = ...,
    kernel: Kernel = ...,
) -> torch.Tensor: ...


@overload
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = ...,
    temperature: float = ...,
    logit_softcap: float | None = ...,
    logit_scale: float | None = ...,
    entropy: Literal[True],
    ignore_index: int = ...,
    tile: int | str = ...,
    kernel: Kernel = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@outside_graph
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    entropy: bool = False,
    ignore_index: int = -100,
    tile: int | str = "auto",
    kernel: Kernel = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probability of each chosen token under `hidden @ weight.T + bias`, and entropies if asked.

    `hidden` is `[..., width]`, `weight` `[vocabulary, width]`, `tokens` `[...]`: hidden states already stand beside the
    tokens that they predict. Logits exist for one tile at a time; they are computed again in backward, so that forward
    and backward cost four matrix products. `logit_scale` multiplies the logits, `logit_softcap` limits them
    (`softcap * tanh(logits / softcap)`), `temperature` divides them, in this order, which is that of models and
    trainers. With `entropy=True` the result is a pair, log-probabilities and entropies; both can be differentiated.
    Results are in single precision at least. Where a token is `ignore_index`, both are 0, and so are their gradients.

    `tile` is the number of tokens in a tile. `kernel="auto"` takes the fused kernel of TRL (1.16 or later) on CUDA and
    XPU if it is installed, the head has no bias and no tile size is given; else, or with `"torch"`, plain torch. TRL's
    kernel gives NaN where a logit is minus infinity, so `"trl"` is refused for a bias with such a value.
    """
    options = LogProbOptions(ignore_index, temperature, logit_softcap, logit_scale)
    _check(options, tile, kernel)
    check_tensors(hidden, weight, tokens, bias, labels_are="tokens")
    refuse_transforms("linear_log_probs")
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    hidden, weight, bias = as_autocast_would(hidden, weight, bias)
    flat = hidden.reshape(-1, hidden.shape[-1])
    chosen = tokens.reshape(-1).to(hidden.device, torch.int64)
    size = tile_tokens(weight.shape[0], tile)
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    compute = trl_log_probs if tile == "auto" and use_trl(kernel, flat, bias, options) else _TokenLogProbs.apply
    log_probs, entropies = compute(flat, weight, bias, chosen, options, entropy, size)
    log_probs = log_probs.view(tokens.shape)
    return log_probs if entropies is None else (log_probs, entropies.view(tokens.shape))


linear_log_probs.__module__ = "lowtide"


def _check(options: LogProbOptions, tile: int | str, kernel: str) -> None:
    check_numbers(options)
    if not options.temperature > 0:
        raise InvalidValueError(f"temperature must be positive, got {options.temperature}")
    if kernel not in ("auto", "torch", "trl"):
        raise InvalidValueError(f"kernel must be 'auto', 'torch' or 'trl', got {kernel!r}")
    if kernel == "trl" and tile != "auto":
        raise InvalidValueError("kernel='trl' has its own tile size: leave tile out")


class _TileLogProbs:
    """The log-probabilities and entropies of a tile, and the buffer that becomes the gradient of its logits."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        options: LogProbOptions,
        *,
        entropy: bool,
    ) -> None:
        self._temperature = options.temperature
        self._valid = tokens != options.ignore_index
        self._tokens = tokens.masked_fill(~self._valid, 0).unsqueeze(1)
        self._logits = TileLogits(hidden, weight, bias, scale=options.logit_scale, softcap=options.logit_softcap)
        values = self._logits.take()
        if self._temperature != 1:
            values.div_(self._temperature)
        target = values.gather(1, self._tokens).squeeze(1)
        largest = values.amax(1, keepdim=True)
        self._exponentials = values.sub_(largest).exp_()
        self._sums = self._exponentials.sum(1, keepdim=True)
        rest = self._sums.log()
        self.log_probs = torch.where(self._valid, target - rest.add(largest).squeeze(1), 0)
        self._entropies: torch.Tensor | None = None
        if entropy:
            self._entropies = rest + torch.special.entr(self._exponentials).sum(1, keepdim=True) / self._sums

    @property
    def entropies(self) -> torch.Tensor | None:
        """One entropy per token; 0 where no token was chosen; None if they were not asked for."""
        if self._entropies is None:
            return None
        return torch.where(self._valid, self._entropies.squeeze(1), 0)

    def logit_gradient(self, of_log_probs: torch.Tensor | None, of_entropies: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the logits for upstream gradients per token. Uses up the buffer: call it once."""
        gradient = self._exponentials.div_(self._sums)
        on_token = self._factor(of_log_probs, gradient)
        if of_entropies is None or self._entropies is None:
            gradient.mul_(-on_token)
        else:
            on_entropy = self._factor(of_entropies, gradient)
            surprise = torch.special.entr(gradient).mul_(on_entropy)
            gradient.mul_(-(on_token + on_entropy * self._entropies)).add_(surprise)
            del surprise
        gradient.scatter_add_(1, self._tokens, on_token)
        return self._logits.gradient(gradient)

    def _factor(self, upstream: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        if upstream is None:
            return torch.zeros_like(self._sums)
        return torch.where(self._valid, upstream.to(like.dtype) / self._temperature, 0).unsqueeze(1)


class _TokenLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies per token; the logits are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        options: LogProbOptions,
        entropy: bool,
        size: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.options, ctx.entropy, ctx.size = options, entropy, size
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=wide)
        entropies = torch.empty_like(log_probs) if entropy else None
        for rows in tile_rows(len(hidden), size):
            step = _TileLogProbs(hidden[rows], weight, bias, tokens[rows], options, entropy=entropy)
            log_probs[rows] = step.log_probs
            if entropies is not None and step.entropies is not None:
                entropies[rows] = step.entropies
            del step  # before the next tile's logits
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *upstreams: torch.Tensor | None) -> Any:
        refuse_second_derivative("linear_log_probs")
        hidden, weight, bias, tokens = ctx.saved_tensors
        of_log_probs, of_entropies = upstreams
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        needs_entropies = of_entropies is not None
        for rows in tile_rows(len(hidden), ctx.size):
            step = _TileLogProbs(hidden[rows], weight, bias, tokens[rows], ctx.options, entropy=needs_entropies)
            ours = (None if upstream is None else upstream[rows] for upstream in (of_log_probs, of_entropies))
            gradients.add(rows, hidden[rows], step.logit_gradient(*ours))
            del step  # before the next tile's logits
        return *gradients.cast(), *[None] * 4
