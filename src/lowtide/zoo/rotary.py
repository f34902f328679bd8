"""Rotary positions that fit the small heads."""

from __future__ import annotations

import copy
from typing import Any

from lowtide.zoo.classes import is_in_source

# Fewer rotated pairs than this do not hold the sections for time, height and width.
LEAST_SHARE = 0.5


def shrink_rotary(config: Any, head_dim: int) -> dict[str, Any]:
    """The rotary parameters, where they say how the pairs of a head are divided among time, height and width."""
    parameters = vars(config).get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    small = copy.deepcopy(parameters)
    if "mrope_section" not in str(parameters):
        if not _has_built_in_sections(config):
            return {}
        small["mrope_section"] = [1, 1, 1]
    _fit_sections(small, head_dim)
    return {"rope_parameters": small}


def _has_built_in_sections(config: Any) -> bool:
    """Whether the model falls back on sections of its own, which then belong to large heads."""
    return hasattr(config, "vocab_size") and is_in_source(config.__class__, '"mrope_section"')


def _fit_sections(parameters: dict[str, Any], head_dim: int) -> None:
    for value in list(parameters.values()):
        if isinstance(value, dict):
            _fit_sections(value, head_dim)
    sections = parameters.get("mrope_section")
    if not sections:
        return
    share = parameters.get("partial_rotary_factor")
    if share is not None:
        share = parameters["partial_rotary_factor"] = max(share, LEAST_SHARE)
    pairs = int(head_dim * (share or 1.0)) // 2
    first = pairs - (len(sections) - 1) * (pairs // len(sections))
    parameters["mrope_section"] = [first] + [pairs // len(sections)] * (len(sections) - 1)
