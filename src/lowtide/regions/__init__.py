"""Finds what a policy acts on, in any `nn.Module`: blocks, their MLPs and mixtures of experts, and the head."""

from __future__ import annotations

from lowtide.regions.blocks import Region, Selector, find_regions
from lowtide.regions.head import Head, find_head
from lowtide.regions.mlps import find_mlps, listed_experts

__all__ = ["Head", "Region", "Selector", "find_head", "find_mlps", "find_regions", "listed_experts"]
