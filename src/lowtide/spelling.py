"""Reads names as people write them: in any spelling, and with the nearest known name where one is unknown."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def normalize(name: str) -> str:
    """Reduce a name to lower-case letters and digits: `RTX 4090`, `rtx-4090` and `RTX4090` are one name."""
    return "".join(filter(str.isalnum, name.lower()))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, if there is one."""
    names = {normalize(name): name for name in known}
    near = difflib.get_close_matches(normalize(word), names, n=1)
    return names[near[0]] if near else None


def unknown(word: object, known: Iterable[object], what: str) -> str:
    """Say that `word` is an unknown `what`, and name the nearest known one, or all of them.

    `unknown("ofload", words, "policy word")` returns "unknown policy word 'ofload': did you mean 'offload'?".
    """
    names = [str(name) for name in known]
    near = nearest(str(word), names)
    hint = f"did you mean {near!r}?" if near else f"use one of {', '.join(names)}"
    return f"unknown {what} {str(word)!r}: {hint}"
