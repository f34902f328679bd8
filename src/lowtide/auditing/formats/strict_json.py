"""JSON that every reader takes: it has no word for what is no finite number, so that is written as a string.

`float("Infinity")`, `float("-Infinity")` and `float("NaN")` read these strings back.
"""

from __future__ import annotations

import json
import math
from typing import Any


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Plain data as JSON."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(held) for name, held in value.items()}
    return [_finite(held) for held in value] if isinstance(value, list | tuple) else value
