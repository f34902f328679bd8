"""Knows accelerators: their data sheets, which one this machine has, and what share of its figures is reached."""

from __future__ import annotations

from lowtide.hardware.accelerators import Accelerator, find_accelerator, read_accelerator

__all__ = ["Accelerator", "find_accelerator", "read_accelerator"]
