"""The solver finds what trying everything finds."""

from __future__ import annotations

import itertools

import pytest

from lowtide.planning.solver import solve
from lowtide.simulation.region_costs import REGION_POLICIES, RegionCosts, RegionPolicyCost, StepCosts

PLENTY = 2**60
"""Of host memory."""


def _costs(count: int, base: int) -> StepCosts:
    """Blocks that hold 10 when kept and 1 when recomputed; recomputing takes 3 s more, moving waits 2 s."""
    each = {
        "none": RegionPolicyCost(
            waiting=10, forward_bytes=12, backward_bytes=14, forward_seconds=2, backward_seconds=4, moved=0
        ),
        "recompute": RegionPolicyCost(
            waiting=1, forward_bytes=3, backward_bytes=14, forward_seconds=2, backward_seconds=7, moved=0
        ),
        "offload": RegionPolicyCost(
            waiting=0, forward_bytes=8, backward_bytes=14, forward_seconds=3, backward_seconds=6, moved=10
        ),
        "recompute+offload": RegionPolicyCost(
            waiting=0, forward_bytes=3, backward_bytes=14, forward_seconds=2, backward_seconds=7.5, moved=1
        ),
    }
    regions = [
        RegionCosts(name=f"layers.{place}", forward_base=base, backward_base=base, by_policy=each)
        for place in range(count)
    ]
    return StepCosts(regions=regions, between_base=base + 4, after_bytes=base, other_seconds=1)


def _brute_force(costs: StepCosts, budget: int) -> float | None:
    best = None
    for kinds in itertools.product(REGION_POLICIES, repeat=len(costs.regions)):
        waiting, fits, seconds = 0, True, costs.other_seconds
        for region, kind in zip(costs.regions, kinds, strict=True):
            cost = region.by_policy[kind]
            highest = max(region.forward_base + cost.forward_bytes, region.backward_base + cost.backward_bytes)
            fits &= waiting + highest <= budget
            waiting += cost.waiting
            seconds += cost.forward_seconds + cost.backward_seconds
        fits &= waiting + costs.between_base <= budget and costs.after_bytes <= budget
        if fits and (best is None or seconds < best):
            best = seconds
    return best


@pytest.mark.parametrize("budget", range(20, 70, 5))
def test_the_solver_finds_what_trying_everything_finds(budget: int):
    costs = _costs(4, base=8)
    choice = solve(costs, budget, PLENTY, link_rate=1e9)
    best = _brute_force(costs, budget)
    assert (choice is None) == (best is None)
    if choice is not None:
        assert choice.seconds == pytest.approx(best, rel=1e-4)


def test_the_solver_minds_the_host_and_the_link():
    costs = _costs(6, base=0)
    assert "offload" in solve(costs, 24, PLENTY, link_rate=1e9).region_policies.values()
    within = solve(costs, 24, 2, link_rate=1e9)
    assert "offload" not in within.region_policies.values()
    assert (
        solve(costs, 24, PLENTY, link_rate=0.1).region_policies
        != solve(costs, 24, PLENTY, link_rate=1e9).region_policies
    )
    assert solve(costs, 3, PLENTY, link_rate=1e9) is None
