"""Answers whether a training step fits, and which policy is the fastest that fits, without an accelerator.

`planner.plan` asks a worker process (`lowtide.simulation`) for figures. There, a `Simulator` builds the model without
weights, runs one step of it through the real engine on meta tensors, and reads the figures out of the recording. Long
stacks are simulated at two short lengths and extrapolated. The solver mixes policies region by region, and the winner
is simulated with all its layers. `max_fit` answers the other question: how long a sequence, or how large a batch, fits.
"""

from __future__ import annotations

from lowtide.planning.planner import plan
from lowtide.planning.result import Candidate, Plan

__all__ = ["Candidate", "Plan", "plan"]
