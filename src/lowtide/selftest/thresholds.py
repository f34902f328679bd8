"""States every threshold of the self-test, once: a verdict compares a figure of its record with one of these."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits between a pass and a failure. A record carries those that it was judged by."""

    freed: float = 0.05
    """How far the bytes after forward and the peak may exceed what a policy should leave, relative to it. Allocators
    round, and libraries take workspaces."""
    leftover_bytes: int = 0
    """How many bytes a step may leave behind, beyond those that were there before it."""
    hidden: float = 0.5
    """The share of the time of offload's copies that must be hidden behind kernels, where they take less time than the
    kernels do. Copies on the compute stream hide none; the first and the last cannot be hidden entirely."""
    link: float = 0.5
    """The share of the data sheet's link that copies from and to pinned memory must reach. A card whose link is half as
    wide as it should be, or of an older generation of PCIe, reaches at most half of it."""
    plan_peak: float = 0.05
    """How far a planned peak may be from the measured one, relative to it."""
    plan_order: float = 0.15
    """Two policies whose measured steps differ by more than this, relative to the shorter, must be in the planned
    order. The order is what a plan claims about time; the error of each time is recorded beside it."""
    plan_margin: float = 0.05
    """Planned steps that differ by less than this are in no order, and so not in the wrong one."""
    own_noise: float = 2.0
    """How many times as much as in the plain model's own reruns a gradient may differ, where it should not."""
    seconds: int = 540
    """After this time, whatever has not begun is left out. A self-test takes under ten minutes."""


THRESHOLDS = Thresholds()
