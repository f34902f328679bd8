"""Exceptions: what a single architecture needs beyond the rules, each with its reason.

Keyed by the model type of a configuration; it holds wherever that configuration occurs, also inside others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.zoo.rules import Plan

CONFIG: dict[str, dict[str, Any]] = {}


def override_for(config: Any, plan: Plan) -> dict[str, Any]:  # noqa: ARG001
    """The fields that this configuration gets whatever the rules say."""
    return CONFIG.get(config.model_type, {})
