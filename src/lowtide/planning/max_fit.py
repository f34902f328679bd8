"""Finds how long a sequence fits, or how large a batch: the other question that a simulation can answer.

What a policy needs grows almost in proportion to the tokens, so a line through two simulated points tells where to look
next, and two or three more points close in on the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from lowtide.hardware.accelerators import margins_for
from lowtide.planning.result import INAPPLICABLE, judge
from lowtide.policy.rules import joined
from lowtide.simulation.cache import CachedSimulator
from lowtide.targets.target import find_target
from lowtide.units import parse_share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.planning.result import Candidate
    from lowtide.simulation.estimate import Estimate
    from lowtide.targets.job import Job

LESS = ("none", "recompute", "recompute+tile(loss)", "recompute+offload+tile(loss)")
"""The usual policies that tile no region, of which those are tried whose tiles the model has."""

MOST = ("recompute(keep=attention)+offload", "recompute+offload")
"""Those that are tried with the most that can be tiled."""

_STEP = {"tokens": 1024, "batch_size": 1}
"""To what the answer is exact."""

_FIRST = {"tokens": (2048, 8192), "batch_size": (1, 2)}
"""The two points that are simulated first."""

_ROUNDS = 8
"""The most points that are simulated after them."""

_MOST = {"tokens": 4 * 2**20, "batch_size": 4096}


class Needed(Protocol):
    """A function that returns what a policy needs as a share of the budget, and the policy with its figures."""

    def __call__(self, policy: str, value: int, *, exact: bool = False) -> tuple[float, Candidate]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxFit:
    """The longest sequence or the largest batch that fits under one policy."""

    policy: str
    most: int
    """Tokens or sequences; 0 if not even the least fits."""
    estimate: Estimate | None
    """The figures of that step; None if nothing fits."""
    device_bytes: int | None = None
    """Bytes that it needs on the device, including margins."""
    positions: int | None = None
    """The positions that the model's configuration names, if the sequence is longer."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def find_max(
    model: Any,
    job: Job,
    accelerator: Accelerator,
    *,
    dimension: str = "tokens",
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    headroom: float | str = 0.0,
    policies: Sequence[str] | None = None,
    cache: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    on_row: Callable[[MaxFit], None] | None = None,
) -> list[MaxFit]:
    """Find the most that fits along a dimension, `tokens` (to 1024) or `batch_size`, for each policy.

    Without `policies`, the usual ones are tried, without those that do nothing to this model. The share `headroom` of
    the device's budget stays free. `on_row` is called with each row as soon as it is known.
    """
    limit, host_limit = accelerator.budgets(budget, host_budget)
    limit = int(limit * (1 - parse_share(headroom)))
    found = []
    with CachedSimulator(find_target(model), job, accelerator, enabled=cache) as simulator:

        def needed(policy: str, value: int, *, exact: bool = False) -> tuple[float, Candidate]:
            asked = dataclasses.replace(job, **{dimension: value})  # type: ignore[arg-type]
            simulator.change_job(asked)
            estimate = simulator.estimate(policy, exact=exact)
            candidate = judge(estimate, limit, host_limit, margins_for(accelerator, asked.ranks))
            return max(candidate.device_bytes / limit, estimate.host_bytes / max(1, host_limit)), candidate

        positions = simulator.summary.longest if dimension == "tokens" else None
        wanted = policies or usual_policies(simulator.summary.tile_options)
        left_out = () if policies else INAPPLICABLE
        for place, policy in enumerate(wanted):
            if progress is not None:
                progress(policy, place, len(wanted))
            with contextlib.suppress(*left_out):
                row = _search(policy, needed, dimension)
                beyond = positions if positions is not None and row.most > positions else None
                found.append(dataclasses.replace(row, positions=beyond))
                if on_row is not None:
                    on_row(found[-1])
    return found


def usual_policies(tile_options: Sequence[str]) -> list[str]:
    """Return the policies that are tried for a model with these tile options, the last of which tiles the most."""
    less = [policy for policy in LESS if policy.endswith("tile(loss)") <= ("tile(loss)" in tile_options)]
    tiles_regions = tile_options[-1] not in ("", "tile(loss)")
    return less + [joined(policy, tile_options[-1]) for policy in MOST if tiles_regions]


def _search(policy: str, needed: Needed, dimension: str) -> MaxFit:
    step, most = _STEP[dimension], _MOST[dimension]
    first, second = _FIRST[dimension]
    points: dict[int, tuple[float, Candidate]] = {value: needed(policy, value) for value in (first, second)}
    for _ in range(_ROUNDS):
        value = _next_point(points, step, most)
        if value is None:
            break
        points[value] = needed(policy, value)
    fitting = [value for value, (share, _) in points.items() if share <= 1]
    return _confirm(policy, needed, max(fitting, default=0), step)


def _confirm(policy: str, needed: Needed, value: int, step: int) -> MaxFit:
    """Simulate every layer; what turns out a little too large is made a little smaller."""
    while value > 0:
        share, found = needed(policy, value, exact=True)
        if share <= 1:
            return MaxFit(policy=policy, most=value, estimate=found.estimate, device_bytes=found.device_bytes)
        value -= max(step, round(value * (share - 1)) // step * step)
    return MaxFit(policy=policy, most=0, estimate=None)


def _next_point(points: dict[int, tuple[float, Candidate]], step: int, most: int) -> int | None:
    """Return where the line through the two nearest points meets the budget; None if no point is left to try."""
    below = max((value for value, (share, _) in points.items() if share <= 1), default=None)
    above = min((value for value, (share, _) in points.items() if share > 1), default=None)
    if below is None:
        return None if above is None or above <= step else max(step, above // 2 // step * step)
    if above is not None and above - below <= step:
        return None
    left, right = sorted(points)[:2] if above is None and len(points) == 2 else _nearest_pair(points, below, above)  # noqa: PLR2004
    (low, _), (high, _) = points[left], points[right]
    slope = (high - low) / (right - left)
    guess = most if slope <= 0 else left + (1 - low) / slope
    guess = int(guess) // step * step
    upper = most if above is None else above - step
    value = min(max(guess, below + step), upper)
    return None if value in points else value


def _nearest_pair(points: dict[int, Any], below: int, above: int | None) -> tuple[int, int]:
    if above is not None:
        return below, above
    second, first = sorted(points, reverse=True)[:2]
    return first, second
