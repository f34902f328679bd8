"""How long a sequence fits, or how large a batch: the other question that a plan can answer.

What a policy needs grows almost in proportion to the tokens, so a line through two simulated points tells where to look
next; two or three more points close in on the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from lowtide.hardware.accelerators import margins_for
from lowtide.planning.result import INAPPLICABLE, judged
from lowtide.simulation.cache import CachedSimulator
from lowtide.targets.target import find_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.planning.result import Candidate
    from lowtide.simulation.estimate import Estimate
    from lowtide.targets.job import Job

POLICIES = (
    "none",
    "recompute",
    "recompute+tile(loss)",
    "recompute+offload+tile(loss)",
    "recompute+offload+tile(mlp)",
    "recompute+offload+tile",
)
"""The usual ones. `tile(mlp)` alone is for models that tile no loss: of these, what the model takes is looked at."""

_STEP = {"tokens": 1024, "batch_size": 1}

_FIRST = {"tokens": (2048, 8192), "batch_size": (1, 2)}

_ROUNDS = 8

_MOST = {"tokens": 16 * 2**20, "batch_size": 4096}


class Needed(Protocol):
    """What a policy needs, as a share of the budget, and the policy with its figures."""

    def __call__(self, policy: str, value: int, *, exact: bool = False) -> tuple[float, Candidate]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxFit:
    """Of one policy: the most that fits, with its figures; None if not even the least does."""

    policy: str
    most: int
    estimate: Estimate | None
    device_bytes: int | None = None
    """What that needs on the device, margins included."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def find_max(
    model: Any,
    job: Job,
    accelerator: Accelerator,
    *,
    figure: str = "tokens",
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    policies: Sequence[str] | None = None,
    cache: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[MaxFit]:
    """The most `tokens` (to 1024) or the largest `batch_size` that fits, for each policy, or each of the usual ones."""
    limit, host_limit = accelerator.budgets(budget, host_budget)
    found = []
    with CachedSimulator(find_target(model), job, accelerator, enabled=cache) as simulator:

        def needed(policy: str, value: int, *, exact: bool = False) -> tuple[float, Candidate]:
            asked = dataclasses.replace(job, **{figure: value})  # type: ignore[arg-type]
            simulator.change_job(asked)
            estimate = simulator.estimate(policy, exact=exact)
            candidate = judged(estimate, limit, host_limit, margins_for(asked, accelerator))
            return max(candidate.device_bytes / limit, estimate.host_bytes / max(1, host_limit)), candidate

        wanted = policies or [policy for policy in POLICIES if _tiling_of(policy) in simulator.summary.tile_options]
        left_out = () if policies else INAPPLICABLE
        for place, policy in enumerate(wanted):
            if progress is not None:
                progress(policy, place, len(wanted))
            with contextlib.suppress(*left_out):
                found.append(_search(policy, needed, figure))
    return found


def _tiling_of(policy: str) -> str:
    return next((word for word in policy.split("+") if word.startswith("tile")), "")


def _search(policy: str, needed: Needed, figure: str) -> MaxFit:
    step, most = _STEP[figure], _MOST[figure]
    first, second = _FIRST[figure]
    points: dict[int, tuple[float, Candidate]] = {value: needed(policy, value) for value in (first, second)}
    for _ in range(_ROUNDS):
        value = _next(points, step, most)
        if value is None:
            break
        points[value] = needed(policy, value)
    fitting = [value for value, (share, _) in points.items() if share <= 1]
    return _confirmed(policy, needed, max(fitting, default=0), step)


def _confirmed(policy: str, needed: Needed, value: int, step: int) -> MaxFit:
    """Simulated whole; what turns out a little too long is made a little shorter."""
    while value > 0:
        share, found = needed(policy, value, exact=True)
        if share <= 1:
            return MaxFit(policy=policy, most=value, estimate=found.estimate, device_bytes=found.device_bytes)
        value -= max(step, round(value * (share - 1)) // step * step)
    return MaxFit(policy=policy, most=0, estimate=None)


def _next(points: dict[int, tuple[float, Candidate]], step: int, most: int) -> int | None:
    """Where the line through the two nearest points meets the budget; None if there is nothing between them."""
    below = max((value for value, (share, _) in points.items() if share <= 1), default=None)
    above = min((value for value, (share, _) in points.items() if share > 1), default=None)
    if below is None:
        return None if above is None or above <= step else max(step, above // 2 // step * step)
    if above is not None and above - below <= step:
        return None
    left, right = sorted(points)[:2] if above is None and len(points) == 2 else _pair(points, below, above)  # noqa: PLR2004
    (low, _), (high, _) = points[left], points[right]
    slope = (high - low) / (right - left)
    guess = most if slope <= 0 else left + (1 - low) / slope
    guess = int(guess) // step * step
    upper = most if above is None else above - step
    value = min(max(guess, below + step), upper)
    return None if value in points else value


def _pair(points: dict[int, Any], below: int, above: int | None) -> tuple[int, int]:
    if above is not None:
        return below, above
    second, first = sorted(points, reverse=True)[:2]
    return first, second
