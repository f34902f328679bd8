"""Will it fit, and which policy is the fastest that fits: a training step, simulated without an accelerator.

`planner.plan` asks a process of its own (`worker`) for figures. There, a `Simulator` builds the model without weights,
runs one step of it through the real engine on blank tensors (`step`, `blank`), and reads the figures out of the record
(`estimate`). Long stacks are simulated at two short lengths and carried on (`layers`, `whole`). The solver mixes
treatments region by region (`region_costs`, `solver`), and the winner is simulated whole.
"""

from __future__ import annotations

from lowtide.hardware.accelerators import Accelerator, find_accelerator
from lowtide.planning.planner import plan
from lowtide.planning.result import Candidate, Plan

__all__ = ["Accelerator", "Candidate", "Plan", "find_accelerator", "plan"]
