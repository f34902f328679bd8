"""Writes a choice of treatments as a policy: one word for most regions, and a few globs for the others."""

from __future__ import annotations

import collections
import itertools

from lowtide.policy import Policy


def as_policy(treatments: dict[str, str], tile: str) -> Policy:
    """A policy that gives every region its treatment, with a tiling (or `""`) in all of them."""
    usual = collections.Counter(treatments.values()).most_common(1)[0][0]
    # a model has one loss, which no rule can name
    tile_of_a_region = "" if tile in ("", "tile(loss)") else "tile(mlp)"
    rules = [f"{glob}: {joined(treatment, tile_of_a_region)}" for glob, treatment in _globs(treatments, usual)]
    return Policy.parse("; ".join([joined(usual, tile), *rules]))


def joined(treatment: str, tile: str) -> str:
    """A policy of a treatment and a tiling."""
    if not tile:
        return treatment
    return tile if treatment == "none" else f"{treatment}+{tile}"


def _globs(treatments: dict[str, str], usual: str) -> list[tuple[str, str]]:
    """Patterns for the regions that are not as usual: whole stacks, or ranges of their numbers."""
    stacks = list(dict.fromkeys(name.rpartition(".")[0] for name in treatments))
    found = []
    for stack, names in itertools.groupby(treatments, key=lambda name: name.rpartition(".")[0]):
        members = list(names)
        short = _short(stack, stacks)
        for treatment, run in itertools.groupby(members, key=lambda name: treatments[name]):
            numbers = [name.rpartition(".")[2] for name in run]
            if treatment == usual:
                continue
            if len(numbers) == len(members):
                found.append((f"{short}.*", treatment))
            elif all(number.isdigit() for number in numbers):
                found += [(f"{short}.{glob}", treatment) for glob in range_globs(int(numbers[0]), int(numbers[-1]))]
            else:
                found += [(f"{short}.{number}", treatment) for number in numbers]
    return found


def _short(stack: str, stacks: list[str]) -> str:
    """The end of a stack's name that no other has: it fits whatever wraps the model."""
    parts = stack.split(".")
    for count in range(1, len(parts)):
        tail = ".".join(parts[-count:])
        if not any(other != stack and other.endswith(tail) for other in stacks):
            return f"*{tail}"
    return stack


def range_globs(first: int, last: int) -> list[str]:
    """Globs that fit the numbers from `first` to `last` and no others: 7 to 25 is `[7-9]`, `1[0-9]`, `2[0-5]`."""
    globs = []
    while first <= last:
        end = min(last, first // 10 * 10 + 9)
        tens = str(first // 10) if first >= 10 else ""  # noqa: PLR2004
        low, high = first % 10, end % 10
        globs.append(f"{tens}{low}" if low == high else f"{tens}[{low}-{high}]")
        first = end + 1
    return globs
