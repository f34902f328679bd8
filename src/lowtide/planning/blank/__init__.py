"""A training step without a device: blank tensors, the few values that matter, a ledger of bytes, a virtual clock."""

from __future__ import annotations

from lowtide.planning.blank.attention import Attention
from lowtide.planning.blank.clock import DEVICE, Clock
from lowtide.planning.blank.costs import Rates
from lowtide.planning.blank.ledger import Ledger
from lowtide.planning.blank.surroundings import simulated_device

__all__ = [
    "DEVICE",
    "Attention",
    "Clock",
    "Ledger",
    "Rates",
    "simulated_device",
]
