"""The solver finds what trying everything finds."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from lowtide.planning.solver import solve
from lowtide.simulation.region_costs import REGION_POLICIES, RegionCosts, RegionPolicyCost, StepCosts

PLENTY = 2**60
"""Of host memory."""

KEEPING = "recompute(keep=attention)"


def _costs(count: int, base: int) -> StepCosts:
    """Blocks that hold 10 when kept and 1 when recomputed; recomputing takes 3 s more, moving waits 2 s.

    With attention kept they hold 3, and recomputing takes 1 s more.
    """
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
        KEEPING: RegionPolicyCost(
            waiting=3, forward_bytes=5, backward_bytes=14, forward_seconds=2, backward_seconds=5, moved=0, kept=1
        ),
        f"{KEEPING}+offload": RegionPolicyCost(
            waiting=0, forward_bytes=5, backward_bytes=14, forward_seconds=2, backward_seconds=5.5, moved=3, kept=1
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
    costs = _without(_costs(6, base=0), KEEPING, f"{KEEPING}+offload")
    assert "offload" in solve(costs, 24, PLENTY, link_rate=1e9).region_policies.values()
    within = solve(costs, 24, 2, link_rate=1e9)
    assert "offload" not in within.region_policies.values()
    assert (
        solve(costs, 24, PLENTY, link_rate=0.1).region_policies
        != solve(costs, 24, PLENTY, link_rate=1e9).region_policies
    )
    assert solve(costs, 3, PLENTY, link_rate=1e9) is None


def _without(costs: StepCosts, *policies: str) -> StepCosts:
    """The same step, in which these policies do not apply."""
    regions = [
        dataclasses.replace(
            region, by_policy={name: cost for name, cost in region.by_policy.items() if name not in policies}
        )
        for region in costs.regions
    ]
    return dataclasses.replace(costs, regions=regions)


class TestRecomputeThatKeepsAttention:
    @pytest.mark.parametrize(
        ("budget", "chosen"),
        [
            (20, ["recompute"] * 5 + ["none"]),
            (24, ["recompute"] * 3 + [KEEPING] * 2 + ["none"]),
            (30, [KEEPING] * 5 + ["none"]),
            (48, [KEEPING] * 3 + ["none"] * 3),
        ],
    )
    def test_it_is_chosen_where_there_is_room_for_what_is_kept(self, budget: int, chosen: list[str]):
        assert list(solve(_costs(6, base=0), budget, 0, link_rate=1e9).region_policies.values()) == chosen

    @pytest.mark.parametrize(
        ("host_budget", "chosen"),
        [
            (12, [f"{KEEPING}+offload"] * 4 + [KEEPING, "none"]),
            (6, [f"{KEEPING}+offload"] * 2 + ["recompute"] * 2 + [KEEPING, "none"]),
        ],
    )
    def test_what_is_kept_may_wait_on_the_host(self, host_budget: int, chosen: list[str]):
        assert list(solve(_costs(6, base=0), 19, host_budget, link_rate=1e9).region_policies.values()) == chosen

    def test_a_model_without_attention_is_solved_without_it(self):
        costs = _without(_costs(6, base=0), KEEPING, f"{KEEPING}+offload")
        choice = solve(costs, 30, 0, link_rate=1e9)
        assert set(choice.region_policies.values()) == {"recompute", "none"}
        assert choice.seconds > solve(_costs(6, base=0), 30, 0, link_rate=1e9).seconds

    def test_nothing_is_kept_where_no_region_has_something_to_keep(self):
        """Of a hybrid model, a mixture that tells only regions without attention to keep it would do nothing."""
        costs = _costs(4, base=0)
        for region in costs.regions:
            plain = region.by_policy["recompute"]
            region.by_policy[KEEPING] = dataclasses.replace(plain, kept=0)
            region.by_policy[f"{KEEPING}+offload"] = region.by_policy["recompute+offload"]
            break_even = {"backward_seconds": plain.backward_seconds - 1e-7}  # by rounding it seems faster
            region.by_policy[KEEPING] = dataclasses.replace(region.by_policy[KEEPING], **break_even)
        choice = solve(costs, 20, 0, link_rate=1e9)
        assert "recompute" in choice.region_policies.values()
        assert not [policy for policy in choice.region_policies.values() if "keep" in policy]


def test_regions_that_no_policy_changes_get_no_rule_of_their_own():
    costs = _costs(4, base=8)
    frozen = RegionPolicyCost(
        waiting=0, forward_bytes=2, backward_bytes=0, forward_seconds=1, backward_seconds=0, moved=0
    )
    tower = [
        RegionCosts(
            name=f"visual.{place}", forward_base=8, backward_base=8, by_policy=dict.fromkeys(REGION_POLICIES, frozen)
        )
        for place in range(6)
    ]
    choice = solve(dataclasses.replace(costs, regions=[*tower, *costs.regions]), 40, PLENTY, link_rate=1e9)
    chosen = [choice.region_policies[f"layers.{place}"] for place in range(4)]
    (of_tower,) = {choice.region_policies[region.name] for region in tower}
    assert chosen.count(of_tower) == max(map(chosen.count, chosen))
