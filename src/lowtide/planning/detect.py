"""The accelerator of this machine, for plans that name none."""

from __future__ import annotations

import dataclasses

import torch

from lowtide.errors import InvalidValueError
from lowtide.planning.accelerators import Accelerator, load_table

_OTHERS = frozenset({"laptop", "mobile", "max", "ti", "super", "d", "mig"})
"""Words after which a name means another card than without."""
_SIMILAR = {"gh200": "H200", "gb200": "B200", "l40": "L40S"}
"""Near in compute. Grace's link to its host is much faster, so offload costs less there than planned."""


def this_accelerator() -> Accelerator:
    """What is here, with the memory that it has."""
    if not torch.cuda.is_available():
        known = ", ".join(row.name for row in load_table())
        raise InvalidValueError(f"there is no GPU here to plan for: name one with device= (known: {known})")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return matched(properties.name, properties.total_memory)


def matched(name: str, memory: int) -> Accelerator:
    """The row of the table whose words a driver's name has; of several sizes, the nearest.

    `L40` is no `L4`, and a laptop's or a part of a card is another one under the same name: what is not known as
    itself is refused, since only its memory would be right.
    """
    words = set(_words(name))
    rows = [row for row in load_table() if words.issuperset(_words(row.name)) and not words & _OTHERS]
    if not rows:
        raise InvalidValueError(
            f"{name!r} is not in Lowtide's table of accelerators: name a similar one with device={_similar(words)}, "
            "and the memory of this one with budget="
        )
    longest = max(len(_words(row.name)) for row in rows)
    best = min(
        (row for row in rows if len(_words(row.name)) == longest), key=lambda candidate: abs(candidate.memory - memory)
    )
    return dataclasses.replace(best, memory=memory)


def _similar(words: set[str]) -> str:
    return next((f'"{known}"' for word, known in _SIMILAR.items() if word in words), "")


def _words(name: str) -> list[str]:
    """`A100-80GB` is told from `A100-40GB` by its memory, not by its name."""
    return [word for word in name.lower().replace("-", " ").split() if not word.endswith("gb")]
