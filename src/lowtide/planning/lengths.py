"""Plans a data set's own lengths: the longest batch tells what fits, and all batches together what a step takes.

Batches are padded to their longest sequence. A data loader shuffles, so a batch is any set of sequences: how likely
each length is to be the longest of a batch follows from counting. The time of a step is simulated at a few lengths, and
taken from a curve through them for all others.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidValueError
from lowtide.simulation.cache import CachedSimulator
from lowtide.targets.target import find_target
from lowtide.units import format_seconds, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from lowtide.planning.result import Plan

_SHORTEST = 64
"""Shorter steps are not simulated: launching kernels is all that they do."""


def read_lengths(path: Path) -> list[int]:
    """Read the lengths of sequences, one in each line: 812 or 2k. Empty lines are left out."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"cannot read lengths from {path}: {error}") from error
    lengths = [_length(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not lengths:
        raise InvalidValueError(f"{path} has no lengths: write the tokens of one sequence in each line")
    return lengths


def _length(path: Path, number: int, line: str) -> int:
    try:
        length = parse_tokens(line.strip())
    except InvalidValueError as error:
        raise InvalidValueError(f"{path}, line {number}: {error}") from error
    if length < 1:
        raise InvalidValueError(f"{path}, line {number}: a sequence has 1 token or more, got {length}")
    return length


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanStep:
    """What the steps of a data set take on average under one policy."""

    policy: str
    sequences: int
    longest: int
    padded: float
    """The mean length to which the sequences of a batch are padded."""
    padding: float
    """The share of all tokens that are padding."""
    seconds: float
    simulated: list[tuple[int, float]]
    """The lengths that were simulated, and the seconds of a step of that length."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        longest, mean = format_seconds(self.simulated[-1][1]), format_seconds(self.seconds)
        return (
            f"{self.sequences:,} sequences, the longest of {self.longest:,} tokens. Under {self.policy}, a step of the "
            f"longest takes {longest}, and a mean one {mean}: its batch is padded to "
            f"{self.padded:,.0f} tokens, of which {self.padding:.0%} are padding"
        )


def step_of(plan: Plan, policy: str, model: Any, lengths: Sequence[int], *, cache: bool = True) -> MeanStep:
    """Return the mean step of a data set under a policy of the plan of its longest sequence."""
    job = plan.job
    with CachedSimulator(find_target(model), job, plan.accelerator, enabled=cache) as simulator:

        def seconds_of(length: int) -> float:
            simulator.change_job(dataclasses.replace(job, tokens=length))
            return simulator.estimate(policy, exact=False).seconds

        return mean_step(lengths, job.batch_size, policy, seconds_of, parts=job.parts)


def longest_of(lengths: Sequence[int], parts: int) -> int:
    """Return the length that a plan must fit: the longest, padded to a multiple of the parts of a sequence."""
    return _padded(max(lengths), parts)


def mean_step(
    lengths: Sequence[int], batch_size: int, policy: str, seconds_of: Callable[[int], float], *, parts: int = 1
) -> MeanStep:
    """Return the mean over all batches of this size. `seconds_of` simulates a step of some length."""
    if batch_size > len(lengths):
        raise InvalidValueError(f"{len(lengths)} sequences do not make a batch of {batch_size}")
    chances = longest_chances(lengths, batch_size)
    points = _points(min(chances), max(chances), parts)
    simulated = [(length, seconds_of(length)) for length in points]
    curve = _curve(simulated)
    padded = sum(chance * length for length, chance in chances.items())
    return MeanStep(
        policy=policy,
        sequences=len(lengths),
        longest=max(lengths),
        padded=padded,
        padding=1 - sum(lengths) / len(lengths) / padded,
        seconds=sum(chance * curve(max(length, points[0])) for length, chance in chances.items()),
        simulated=simulated,
    )


def longest_chances(lengths: Sequence[int], batch_size: int) -> Mapping[int, float]:
    """Return how likely each length is that of the longest sequence of a batch."""
    total = math.comb(len(lengths), batch_size)
    chances, below, before = {}, 0, 0
    for length, count in sorted(collections.Counter(lengths).items()):
        below += count
        batches = math.comb(below, batch_size)
        if batches > before:
            chances[length] = (batches - before) / total
        before = batches
    return chances


def _points(shortest: int, longest: int, parts: int) -> list[int]:
    """Return the lengths to simulate, the shortest first: halves of the longest, down to the shortest."""
    points = [_padded(max(longest, _SHORTEST), parts)]
    end = _padded(max(shortest, _SHORTEST), parts)
    while points[-1] > 2 * end:
        points.append(_padded(points[-1] // 2, parts))
    return sorted({*points, end})


def _padded(length: int, parts: int) -> int:
    return -(-length // parts) * parts


def _curve(simulated: list[tuple[int, float]]) -> Callable[[int], float]:
    """Return a curve through all points that rises wherever they do."""
    if len(simulated) == 1:
        return lambda _: simulated[0][1]
    from scipy.interpolate import PchipInterpolator

    curve = PchipInterpolator(*zip(*simulated, strict=True))
    return lambda length: float(curve(length))
