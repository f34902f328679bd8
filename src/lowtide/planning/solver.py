"""Chooses a policy for every region, so that the step fits and is as fast as possible.

It is a mixed-integer linear program (`scipy.optimize.milp`, HiGHS), with one binary variable for each region and region
policy. Device memory is constrained in the forward and the backward of every region and between the two; host memory by
what is moved there. Copies hide behind compute; what takes longer than compute is a stall, and the two stalls (to the
host in forward, back in backward) are variables that add to the time.

Within a stack, policies come in one order: regions that are offloaded come first, since their bytes have the longest
time to return, and regions that are kept come last, since backward frees them first. That loses nothing where regions
are alike, and makes plans that a person can read.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import optimize

from lowtide.simulation.region_costs import REGION_POLICIES

if TYPE_CHECKING:
    from lowtide.simulation.region_costs import RegionPolicyCost, StepCosts

_POLICIES = range(len(REGION_POLICIES))

_OFFLOAD_PENALTY = 1e-6
"""By which share offload seems slower than it is: among equally fast choices, the one that moves less is taken."""

_ORDER = ("offload", "recompute+offload", "recompute", "none")
"""The order of policies within a stack."""


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
        self._binary = len(costs.regions) * len(REGION_POLICIES)
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
            for position in range(1, len(_ORDER)):
                late = [REGION_POLICIES.index(policy) for policy in _ORDER[position:]]
                here = {self._variable(place, policy): 1.0 for policy in late}
                there = {self._variable(place + 1, policy): -1.0 for policy in late}
                self._add({**here, **there}, 0.0)

    def solve(self) -> Choice | None:
        """Minimise the seconds, with exactly one policy for each region."""
        size = self._binary + 2
        objective = np.ones(size)
        seconds = (self._everywhere("forward_seconds"), self._everywhere("backward_seconds"))
        for variable in range(self._binary):
            objective[variable] = sum(figure[variable] for figure in seconds)
            if "offload" in REGION_POLICIES[variable % len(REGION_POLICIES)]:
                objective[variable] *= 1 + _OFFLOAD_PENALTY
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
            policy = max(_POLICIES, key=lambda policy: result.x[self._variable(place, policy)])
            chosen[region.name] = REGION_POLICIES[policy]
        return Choice(chosen, float(result.fun) + self._costs.other_seconds)

    def _one_policy_each(self) -> list[dict[int, float]]:
        places = range(len(self._costs.regions))
        return [{self._variable(place, policy): 1.0 for policy in _POLICIES} for place in places]

    def _matrix(self, rows: list[dict[int, float]]) -> Any:
        matrix = np.zeros((len(rows), self._binary + 2))
        for place, row in enumerate(rows):
            for variable, factor in row.items():
                matrix[place, variable] = factor
        return matrix

    def _factors(self, place: int, figure: str) -> dict[int, float]:
        return {
            self._variable(place, policy): float(getattr(self._cost(place, policy), figure)) for policy in _POLICIES
        }

    def _everywhere(self, figure: str) -> dict[int, float]:
        places = range(len(self._costs.regions))
        return {variable: factor for place in places for variable, factor in self._factors(place, figure).items()}

    def _cost(self, place: int, policy: int) -> RegionPolicyCost:
        return self._costs.regions[place].by_policy[REGION_POLICIES[policy]]

    def _variable(self, place: int, policy: int) -> int:
        return place * len(REGION_POLICIES) + policy

    def _add(self, row: dict[int, float], most: float) -> None:
        self._rows.append(dict(row))
        self._most.append(most)
