"""Writes a choice of policies, region by region, as one policy: a default for most regions, and globs for the rest."""

from __future__ import annotations

import collections
import itertools

from lowtide.policy import Policy


def as_policy(choice: dict[str, str], tile: str) -> Policy:
    """Return a policy that gives every region its choice, with a tile option (or `""`) in all of them.

    `choice` maps the names of all regions, in the order of the model, to a word such as `recompute+offload`.
    """
    default = collections.Counter(choice.values()).most_common(1)[0][0]
    tile_of_rules = _without_loss(tile)
    rules = [f"{glob}: {joined(word, tile_of_rules)}" for glob, word in _exceptions(choice, default)]
    return Policy.parse("; ".join([joined(default, tile), *rules]))


def _without_loss(tile: str) -> str:
    """Return a tile option as a rule can have it: a model has one loss, which no rule can name."""
    parts = [part for part in Policy.parse(tile or "none").tile if part != "loss"]
    return f"tile({', '.join(parts)})" if parts else ""


def joined(policy: str, tile: str) -> str:
    """Join the policy of a region and a tile option to one policy string."""
    if not tile:
        return policy
    return tile if policy == "none" else f"{policy}+{tile}"


def _exceptions(choice: dict[str, str], default: str) -> list[tuple[str, str]]:
    """Return globs for the regions that differ from the default: whole stacks, or ranges of their numbers."""
    stacks = list(dict.fromkeys(name.rpartition(".")[0] for name in choice))
    found = []
    for stack, names in itertools.groupby(choice, key=lambda name: name.rpartition(".")[0]):
        members = list(names)
        prefix = _shortest_glob(stack, stacks)
        for word, run in itertools.groupby(members, key=lambda name: choice[name]):
            numbers = [name.rpartition(".")[2] for name in run]
            if word == default:
                continue
            if len(numbers) == len(members):
                found.append((f"{prefix}.*", word))
            elif all(number.isdigit() for number in numbers):
                found += [(f"{prefix}.{glob}", word) for glob in range_globs(int(numbers[0]), int(numbers[-1]))]
            else:
                found += [(f"{prefix}.{number}", word) for number in numbers]
    return found


def _shortest_glob(stack: str, stacks: list[str]) -> str:
    """Return a glob on the end of a stack's name that no other stack has: it matches whatever wraps the model."""
    parts = stack.split(".")
    for count in range(1, len(parts)):
        tail = ".".join(parts[-count:])
        if not any(other != stack and other.endswith(tail) for other in stacks):
            return f"*{tail}"
    return stack


def range_globs(first: int, last: int) -> list[str]:
    """Return globs that match exactly the numbers from `first` to `last`: 7 to 25 is `[7-9]`, `1[0-9]`, `2[0-5]`."""
    globs = []
    while first <= last:
        end = min(last, first // 10 * 10 + 9)
        tens = str(first // 10) if first >= 10 else ""  # noqa: PLR2004
        low, high = first % 10, end % 10
        globs.append(f"{tens}{low}" if low == high else f"{tens}[{low}-{high}]")
        first = end + 1
    return globs
