"""`lowtide.linear_cross_entropy`: computes the loss of a language model without ever holding all of its logits."""

from __future__ import annotations

from lowtide.losses.linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
