"""Chooses a policy for every region, so that the step fits and is as fast as possible.

It is a mixed-integer linear program (`scipy.optimize.milp`, HiGHS), with one binary variable for each region and region
policy. Device memory is constrained in the forward and the backward of every region and between the two; host memory by
what is moved there. Copies hide behind compute; what takes longer than compute is a stall, and the two stalls (to the
host in forward, back in backward) are variables that add to the time.

Within a stack, policies come in one order: regions that are offloaded come first, since their bytes have the longest
time to return, and regions that are kept come last, since backward frees them first. That loses nothing where regions
are alike, and makes plans that a person can read.

Of a hybrid model, some regions have no attention. For them, to recompute all but attention is to recompute all, and the
order may give them either; but no region is told to keep attention if none of those that are told so has any.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import optimize

from lowtide.simulation.region_costs import REGION_POLICIES

if TYPE_CHECKING:
    from lowtide.simulation.region_costs import RegionCosts, RegionPolicyCost, StepCosts

_OFFLOAD_PENALTY = 1e-6
"""By which share offload seems slower than it is: among equally fast choices, the one that moves less is taken."""

_KEEP_PENALTY = 1e-7
"""The same for kept outputs: where a region has none, nothing is to be kept."""

_ORDER = (
    "offload",
    "recompute(keep=attention)+offload",
    "recompute+offload",
    "recompute",
    "recompute(keep=attention)",
    "none",
)
"""The order of policies within a stack."""

_WITHOUT_KEEP = {
    "recompute(keep=attention)": "recompute",
    "recompute(keep=attention)+offload": "recompute+offload",
}
"""The policies that keep outputs, and what they are for a region that has no such output."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A solution: the policy of each region, and the seconds that the program expects."""

    region_policies: dict[str, str]
    seconds: float


def solve(costs: StepCosts, budget: int, host_budget: int, link_rate: float) -> Choice | None:
    """Return the fastest choice within the budgets; None if there is none."""
    if costs.after_bytes > budget:
        return None
    program = _Program(costs)
    program.constrain_memory(budget, host_budget)
    program.constrain_link(link_rate)
    program.constrain_order()
    return program.solve()


class _Program:
    """The program. Its variables: one per region and policy, then the stall of forward and the stall of backward."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        known = {policy for region in costs.regions for policy in region.by_policy}
        self._policies = [policy for policy in REGION_POLICIES if policy in known]
        self._binary = len(costs.regions) * len(self._policies)
        self._rows: list[dict[int, float]] = []
        self._most: list[float] = []

    def constrain_memory(self, budget: int, host_budget: int) -> None:
        """Limit the bytes while a region runs: its own, and those that the regions before it hold while they wait."""
        waiting: dict[int, float] = {}
        for place, region in enumerate(self._costs.regions):
            self._add({**waiting, **self._factors(place, "forward_bytes")}, budget - region.forward_base)
            self._add({**waiting, **self._factors(place, "backward_bytes")}, budget - region.backward_base)
            waiting |= self._factors(place, "waiting")
        self._add(waiting, budget - self._costs.between_base)
        self._add(self._everywhere("moved"), host_budget)

    def constrain_link(self, rate: float) -> None:
        """Make each stall at least as long as the copies outlast the compute that they hide behind."""
        for stall, figure in enumerate(("forward_seconds", "backward_seconds")):
            moved, compute = self._everywhere("moved"), self._everywhere(figure)
            row = {variable: moved[variable] / rate - compute[variable] for variable in moved}
            self._add({**row, self._binary + stall: -1.0}, 0.0)

    def constrain_order(self) -> None:
        """Let a stack never return to an earlier policy of `_ORDER`."""
        for place, (region, after) in enumerate(itertools.pairwise(self._costs.regions)):
            if region.name.rpartition(".")[0] != after.name.rpartition(".")[0]:
                continue
            order = [self._policies.index(policy) for policy in _ORDER if policy in self._policies]
            for position in range(1, len(order)):
                late = order[position:]
                here = {self._variable(place, policy): 1.0 for policy in late}
                there = {self._variable(place + 1, policy): -1.0 for policy in late}
                self._add({**here, **there}, 0.0)

    def solve(self) -> Choice | None:
        """Minimise the seconds, with exactly one policy for each region."""
        size = self._binary + 2
        objective = np.ones(size)
        seconds = (self._everywhere("forward_seconds"), self._everywhere("backward_seconds"))
        for variable in range(self._binary):
            policy = self._policies[variable % len(self._policies)]
            penalty = _OFFLOAD_PENALTY * ("offload" in policy) + _KEEP_PENALTY * (policy in _WITHOUT_KEEP)
            objective[variable] = sum(figure[variable] for figure in seconds) * (1 + penalty)
        result = optimize.milp(
            objective,
            constraints=[
                optimize.LinearConstraint(self._matrix(self._rows), -np.inf, self._most),
                optimize.LinearConstraint(self._matrix(self._one_policy_each()), 1, 1),
            ],
            integrality=np.arange(size) < self._binary,
            bounds=optimize.Bounds(0, np.where(np.arange(size) < self._binary, 1, np.inf)),
            options={"mip_rel_gap": 1e-4, "time_limit": 20},
        )
        return None if result.x is None else self._choice(result)

    def _choice(self, result: Any) -> Choice:
        chosen = {}
        for place, region in enumerate(self._costs.regions):
            policy = max(self._numbers, key=lambda policy: result.x[self._variable(place, policy)])
            chosen[region.name] = self._policies[policy]
        if not any(region.by_policy[chosen[region.name]].kept for region in self._costs.regions):
            chosen = {name: _WITHOUT_KEEP.get(policy, policy) for name, policy in chosen.items()}
        return Choice(self._without_idle_rules(chosen), float(result.fun) + self._costs.other_seconds)

    def _without_idle_rules(self, chosen: dict[str, str]) -> dict[str, str]:
        """Give regions that no policy changes, such as a frozen tower's, what most of the others have."""
        idle = {region.name for region in self._costs.regions if _is_idle(region)}
        counts = collections.Counter(policy for name, policy in chosen.items() if name not in idle)
        if not counts:
            return chosen
        most = counts.most_common(1)[0][0]
        return {name: most if name in idle else policy for name, policy in chosen.items()}

    @property
    def _numbers(self) -> range:
        return range(len(self._policies))

    def _one_policy_each(self) -> list[dict[int, float]]:
        places = range(len(self._costs.regions))
        return [{self._variable(place, policy): 1.0 for policy in self._numbers} for place in places]

    def _matrix(self, rows: list[dict[int, float]]) -> Any:
        matrix = np.zeros((len(rows), self._binary + 2))
        for place, row in enumerate(rows):
            for variable, factor in row.items():
                matrix[place, variable] = factor
        return matrix

    def _factors(self, place: int, figure: str) -> dict[int, float]:
        return {
            self._variable(place, policy): float(getattr(self._cost(place, policy), figure)) for policy in self._numbers
        }

    def _everywhere(self, figure: str) -> dict[int, float]:
        places = range(len(self._costs.regions))
        return {variable: factor for place in places for variable, factor in self._factors(place, figure).items()}

    def _cost(self, place: int, policy: int) -> RegionPolicyCost:
        return self._costs.regions[place].by_policy[self._policies[policy]]

    def _variable(self, place: int, policy: int) -> int:
        return place * len(self._policies) + policy

    def _add(self, row: dict[int, float], most: float) -> None:
        self._rows.append(dict(row))
        self._most.append(most)


def _is_idle(region: RegionCosts) -> bool:
    """Return whether a region costs the same bytes under every policy, and moves none of them."""
    costs = list(region.by_policy.values())
    figures = {(cost.waiting, cost.forward_bytes, cost.backward_bytes, cost.moved) for cost in costs}
    return len(figures) == 1 and not costs[0].moved
