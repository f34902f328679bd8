"""The accelerator of this machine, for plans that name none."""

from __future__ import annotations

import dataclasses

import torch

from lowtide.errors import InvalidValueError
from lowtide.planning.accelerators import Accelerator, load_table


def this_accelerator() -> Accelerator:
    """What is here, with the memory that it has."""
    if not torch.cuda.is_available():
        known = ", ".join(row.name for row in load_table())
        raise InvalidValueError(f"there is no GPU here to plan for: name one with device= (known: {known})")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return matched(properties.name, properties.total_memory)


def matched(name: str, memory: int) -> Accelerator:
    """The row of the table that a driver's name means; of several sizes, the nearest."""
    plain = name.lower().replace("-", " ")
    rows = [row for row in load_table() if all(word in plain for word in _words(row.name))]
    if not rows:
        raise InvalidValueError(f"{name!r} is not in Lowtide's table of accelerators: name a similar one with device=")
    longest = max(len(_words(row.name)) for row in rows)
    best = min(
        (row for row in rows if len(_words(row.name)) == longest), key=lambda candidate: abs(candidate.memory - memory)
    )
    return dataclasses.replace(best, memory=memory)


def _words(name: str) -> list[str]:
    """`A100-80GB` is told from `A100-40GB` by its memory, not by its name."""
    return [word for word in name.lower().replace("-", " ").split() if not word.endswith("gb")]
