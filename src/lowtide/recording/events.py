"""The words of a recording: an event, whose bytes it moves, and the moment of the step.

A recording is a list of events in order. Peaks, owners and timelines are read out of that list (`reading`); nothing
else is kept, so whatever writes events, a simulated step or a real one, is shown in the same way.
"""

from __future__ import annotations

from typing import NamedTuple


class Owner(NamedTuple):
    """Who a storage belongs to."""

    kind: str
    """`weights`, `gradients`, `optimizer`, `activations`, `logits`, `workspace`, `batch`, `communication`."""
    block: str
    """The region whose forward (or backward) made it; empty outside of all regions."""


class Moment(NamedTuple):
    """When something happened: the phase of the step, and the region that ran."""

    phase: str
    block: str


class Event(NamedTuple):
    """Bytes come (a positive change) or go; with no change, a storage gets another owner."""

    change: int
    storage: int
    place: str
    owner: Owner
    moment: Moment
    seconds: float
