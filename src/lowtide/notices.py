"""Warns at the line of the user's code that led to the warning, however many libraries lie between.

A warning of the guard comes out of a backward: its next caller is torch. What a user can change is further up.
"""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = frozenset({"lowtide", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "contextlib"})


def warn(message: str) -> None:
    """Warn at the nearest line that is in none of the libraries; if all are, as in an engine's own thread, here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    is_users = not _is_library(frame.f_globals.get("__name__", ""))
    warnings.warn(f"lowtide: {message}", stacklevel=level if is_users else 2)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
