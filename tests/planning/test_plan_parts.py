"""What a plan is made of: the caching allocator, patterns of layers, rules, the solver, tables."""

from __future__ import annotations

import fnmatch
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowtide import errors
from lowtide.errors import InvalidValueError, LowtideError, PlanError
from lowtide.hardware.accelerators import find_accelerator, load_table, match_accelerator
from lowtide.planning.solver import solve
from lowtide.policy.rules import as_policy, range_globs
from lowtide.simulation.allocator import CachingAllocator, OutOfCapacityError
from lowtide.simulation.extrapolation import _find_pattern, find_stack, truncate
from lowtide.simulation.region_costs import REGION_POLICIES, RegionCosts, RegionPolicyCost, StepCosts
from lowtide.targets.job import Job, parse_images

MIB, GIB = 2**20, 2**30
PLENTY = 2**60
"""Of host memory."""


def test_the_allocator_reserves_segments_and_uses_them_again():
    allocator = CachingAllocator()
    allocator.allocate(1, 512)
    assert allocator.reserved == 2 * MIB, "small ones share a segment"
    allocator.allocate(2, 5 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(3, 12 * MIB)
    assert allocator.reserved == 22 * MIB, "the rest of the second segment"
    allocator.free(2)
    allocator.free(3)
    allocator.allocate(4, 19 * MIB)
    assert allocator.reserved == 22 * MIB, "neighbours joined"
    allocator.allocate(5, 30 * MIB)
    assert allocator.peak_reserved == 52 * MIB


def test_the_allocator_gives_back_what_nothing_uses_before_it_gives_up():
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.allocate(1, 60 * MIB)
    allocator.free(1)
    allocator.allocate(2, 80 * MIB)
    assert allocator.reserved == 80 * MIB
    with pytest.raises(OutOfCapacityError):
        allocator.allocate(3, 30 * MIB)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=60))
def test_the_allocator_never_hands_out_the_same_bytes_twice(requests: list[tuple[int, bool]]):
    allocator = CachingAllocator()
    for number, (size, frees) in enumerate(requests):
        allocator.allocate(number, size)
        if frees:
            allocator.free(number)
    taken = sorted((segment, start, start + size) for (size, segment, start), _ in allocator._used.values())
    for (segment, _, end), (other, start, _) in itertools.pairwise(taken):
        assert segment != other or end <= start
    used = sum(end - start for _, start, end in taken)
    assert used <= allocator.reserved <= allocator.peak_reserved


@pytest.mark.parametrize(
    ("forms", "pattern"),
    [("aaaaaaaa", (0, 1)), ("abababab", (0, 2)), ("daaaaaaa", (1, 1)), ("sssssfsssssfss", (0, 6)), ("abcd", (0, 4))],
)
def test_patterns_of_layers(forms: str, pattern: tuple[int, int]):
    first, period = _find_pattern(list(forms))
    assert first + period <= sum(pattern)
    assert all(forms[place] == forms[place - period] for place in range(first + period, len(forms)))


def test_a_stack_is_cut_with_its_pattern():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU() if place % 3 else nn.GELU()) for place in range(14))
    model = nn.ModuleDict({"layers": layers})
    stack = find_stack(model)
    assert stack is not None
    assert (stack.period, stack.short % 3, stack.long % 3) == (3, 14 % 3, 14 % 3), "they end as the whole does"
    truncate(model, stack, stack.long)
    assert len(layers) == stack.long
    assert all((stack.representative(place) - place) % 3 == 0 for place in range(1, 13))


@given(st.integers(0, 120), st.integers(0, 120))
def test_globs_of_a_range_fit_it_and_nothing_else(first: int, last: int):
    globs = range_globs(first, last)
    fitting = [number for number in range(200) if any(fnmatch.fnmatchcase(str(number), glob) for glob in globs)]
    assert fitting == list(range(first, last + 1))


def test_a_choice_becomes_a_policy():
    names = [f"base.visual.blocks.{place}" for place in range(4)] + [f"base.text.layers.{place}" for place in range(20)]
    choice = dict.fromkeys(names, "recompute")
    choice |= dict.fromkeys(names[:4], "none") | dict.fromkeys(names[4:9], "offload")
    policy = as_policy(choice, "tile")
    assert policy.tile == ("mlp", "loss")
    for name in names:
        chosen = policy.for_region(name)
        assert (
            str(chosen).replace("tile(mlp)", "tile").replace("tile", choice[name] if choice[name] == "none" else "tile")
        )
        assert chosen.recompute == (choice[name] == "recompute")
        assert (chosen.offload is not None) == (choice[name] == "offload")
        assert "mlp" in chosen.tile


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


def test_the_table_of_accelerators_has_what_was_promised():
    names = {row.name for row in load_table()}
    assert names >= {"H100", "H200", "B200", "A100-40GB", "A100-80GB", "L40S", "L4", "RTX 4090", "RTX 5090", "RTX 3090"}
    assert names >= {"RTX 6000 Ada", "T4", "MI300X"}
    for row in load_table():
        assert row.source
        assert row.memory > 10 * GIB
        assert row.half_flops >= row.single_flops
        assert row.bandwidth > row.link


def test_accelerators_are_found_in_any_spelling():
    assert find_accelerator("rtx4090").name == "RTX 4090"
    with pytest.raises(InvalidValueError, match="did you mean 'L40S'"):
        find_accelerator("L40")
    assert match_accelerator("NVIDIA A100-SXM4-80GB", 79 * GIB).name == "A100-80GB"
    assert match_accelerator("NVIDIA GeForce RTX 4090", 23 * GIB).memory == 23 * GIB
    with pytest.raises(InvalidValueError, match="not in Lowtide's table"):
        match_accelerator("Quadro P400", GIB)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_driver_s_name_is_matched_by_its_words(name: str, row: str):
    assert match_accelerator(name, 20 * GIB).name == row


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("NVIDIA L40", 'device="L40S", and the memory of this one with budget='),
        ("NVIDIA GH200 480GB", 'device="H200",'),
        ("NVIDIA GB200", 'device="B200",'),
        ("NVIDIA T400", "device=,"),
        ("NVIDIA L400", "device=,"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "device=,"),
        ("NVIDIA GeForce RTX 4090 D", "device=,"),
        ("NVIDIA GeForce RTX 3090 Ti", "device=,"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "device=,"),
        ("Quadro RTX 6000", "device=,"),
    ],
)
def test_a_card_that_is_not_in_the_table_is_no_other(name: str, remedy: str):
    with pytest.raises(InvalidValueError, match="not in Lowtide's table") as error:
        match_accelerator(name, 20 * GIB)
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens must be 1 or more"),
        ({"tokens": 8, "engine": "zero4"}, "unknown engine 'zero4'"),
        ({"tokens": 8, "ranks": 4}, "4 ranks need an engine"),
        ({"tokens": 8, "engine": "ddp"}, "needs ranks=2 or more"),
        ({"tokens": 8, "base": "4bit"}, "cannot be trained itself"),
        ({"tokens": 8, "lora": 0}, "rank of the adapters"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(InvalidValueError, match=message):
        Job(**settings)


def test_pictures_are_written_as_count_and_size():
    assert parse_images("4x1024x768") == (4, 1024, 768)
    with pytest.raises(InvalidValueError, match="COUNTxHEIGHTxWIDTH"):
        parse_images("four")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("InvalidValueError", InvalidValueError),
        ("LowtideError", LowtideError),
        ("NoSuchError", PlanError),
        ("by_name", PlanError),
        ("__builtins__", PlanError),
    ],
)
def test_an_error_of_another_process_is_one_of_the_tree(name: str, error: type[LowtideError]):
    assert errors.by_name(name) is error
