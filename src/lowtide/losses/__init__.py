"""`lowtide.linear_cross_entropy`: the loss of a language model, without its logits ever being whole."""

from __future__ import annotations

from lowtide.losses.linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
