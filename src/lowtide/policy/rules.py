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
    """Return patterns for the regions that differ from the default: ranges of layers, or single regions."""
    stacks = list(dict.fromkeys(name.rpartition(".")[0] for name in choice))
    found = []
    for stack, names in itertools.groupby(choice, key=lambda name: name.rpartition(".")[0]):
        tail = _shortest_tail(stack, stacks)
        for word, run in itertools.groupby(names, key=lambda name: choice[name]):
            numbers = [name.rpartition(".")[2] for name in run]
            if word == default:
                continue
            if len(numbers) > 1 and all(number.isdigit() for number in numbers):
                found.append((_dotted(tail, f"{numbers[0]}-{numbers[-1]}"), word))
            else:
                found += [(f"*{_dotted(tail, number)}", word) for number in numbers]
    return found


def _dotted(stack: str, number: str) -> str:
    return f"{stack}.{number}" if stack else number


def _shortest_tail(stack: str, stacks: list[str]) -> str:
    """Return the end of a stack's name that no other stack has: it fits whatever wraps the model."""
    parts = stack.split(".")
    for count in range(1, len(parts)):
        tail = ".".join(parts[-count:])
        if not any(other != stack and f".{other}".endswith(f".{tail}") for other in stacks):
            return tail
    return stack
