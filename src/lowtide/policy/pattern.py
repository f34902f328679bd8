"""Matches a rule's pattern with the name of a region: a glob on the whole name, or a range of layers.

`visual.*` is a glob. `layers.0-23` means the layers 0 to 23 of every stack whose name ends with `layers`, whatever
wraps the model: `model.layers.7` and `base_model.model.model.layers.7` both fit it.
"""

from __future__ import annotations

import fnmatch
import re

from lowtide.errors import InvalidValueError

_RANGE = re.compile(r"(?:(?P<stack>[\w.]+)\.)?(?P<first>\d+)-(?P<last>\d+)")


def matches(pattern: str, name: str) -> bool:
    """Return whether a region (or a part of one) of this name is meant by a pattern."""
    layers = _RANGE.fullmatch(pattern)
    if layers is None:
        return fnmatch.fnmatchcase(name, pattern)
    stack, _, number = name.rpartition(".")
    is_inside = number.isdigit() and int(layers["first"]) <= int(number) <= int(layers["last"])
    return is_inside and f".{stack}".endswith(f".{layers['stack']}" if layers["stack"] else ".")


def check_pattern(pattern: str) -> None:
    """Refuse a range that ends before it begins."""
    layers = _RANGE.fullmatch(pattern)
    if layers is not None and int(layers["first"]) > int(layers["last"]):
        raise InvalidValueError(f"the rule {pattern!r} means no layer: write the smaller number first")
