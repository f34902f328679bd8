"""Computes the loss, or the log-probabilities, of a language model without ever holding all of its logits."""

from __future__ import annotations

from lowtide.losses.linear_cross_entropy import linear_cross_entropy
from lowtide.losses.linear_log_probs import linear_log_probs

__all__ = ["linear_cross_entropy", "linear_log_probs"]
