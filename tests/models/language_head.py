"""A language model's head: hidden states, weights, labels, and the plain loss of the whole logits."""

from __future__ import annotations

import torch
from torch.nn import functional as F

WIDTH, CLASSES = 16, 50


def whole(
    hidden,
    weight,
    labels,
    *,
    bias=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    logit_softcap=None,
    logit_scale=None,
    shift=False,
):
    """The plain loss."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype is torch.double else logits.float()
    if logit_scale is not None:
        logits = logits * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    losses = F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return losses.view(labels.shape) if reduction == "none" else losses


def problem(lead=(3, 17), dtype=torch.double, device="cpu"):
    torch.manual_seed(0)
    hidden = torch.randn(*lead, WIDTH, dtype=torch.double).to(device, dtype).requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, dtype=torch.double).to(device, dtype).requires_grad_()
    bias = torch.randn(CLASSES, dtype=torch.double).to(device, dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, lead)
    labels[torch.rand(lead) < 0.3] = -100
    return hidden, weight, bias, labels.to(device)


def gradients(loss, inputs, upstream=3.0):
    factor = torch.linspace(0.5, upstream, loss.numel(), dtype=loss.dtype, device=loss.device).view_as(loss)
    return torch.autograd.grad((loss * factor).sum(), inputs)


def assert_close(ours, expected, tolerance=1e-12):
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm()
