"""Which of the policies that fit are recommended, and what the text and the commands say about it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import find_accelerator, margins_for
from lowtide.planning.planner import _Limits, _Planner
from lowtide.planning.result import WayOut
from lowtide.planning.ways_out import Question, find_ways_out
from lowtide.targets.job import Job
from lowtide.units import format_seconds, parse_share
from support.sample_plans import GIB, make_plan

CARD = find_accelerator("L40S")
MARGINS = margins_for(CARD, 1)
MIXED = "tile(loss); layers.0-5: recompute+offload"


def recommend(figures: dict[str, tuple[float, float]], headroom: float = 0.05) -> tuple[str | None, str | None]:
    """Return the simplest and the fastest of policies with these GiB and seconds, for a budget of 20 GiB."""
    limits = _Limits(20 * GIB, 80 * GIB, MARGINS, headroom)
    sample = make_plan(20 * GIB).candidates[0].estimate
    candidates = [
        limits.judge(
            dataclasses.replace(
                sample, policy=policy, needed_bytes=int(size * GIB) - MARGINS.total, seconds=seconds, exact=True
            )
        )
        for policy, (size, seconds) in figures.items()
    ]
    planner = _Planner(None, Job(tokens=8), CARD, limits, exact=True, progress=None, tell=None)
    fastest = planner._fastest(candidates)
    return (planner._simplest(candidates, fastest).policy, fastest.policy) if fastest else (None, None)


def test_the_simplest_within_five_percent_of_the_fastest_is_recommended():
    figures = {MIXED: (18, 1.0), "recompute(keep=attention)": (12, 1.04), "recompute": (10, 1.045), "offload": (9, 1.2)}
    assert recommend(figures) == ("recompute", MIXED)
    assert recommend({**figures, "recompute": (10, 1.06)}) == ("recompute(keep=attention)", MIXED)


def test_headroom_stays_free_unless_nothing_leaves_it():
    figures = {MIXED: (19.5, 1.0), "recompute": (10, 1.3)}
    assert recommend(figures) == ("recompute", "recompute")
    assert recommend(figures, headroom=0.0) == (MIXED, MIXED)
    assert recommend({MIXED: (19.5, 1.0), "none": (30, 0.5)}) == (MIXED, MIXED), "tight is better than nothing"
    assert recommend({"none": (30, 0.5)}) == (None, None)


def test_both_are_told_with_their_reasons():
    plan = make_plan(20 * GIB)
    slower = plan.best
    faster = dataclasses.replace(slower, estimate=dataclasses.replace(slower.estimate, policy=MIXED, seconds=1.25))
    told = str(dataclasses.replace(plan, fastest=faster))
    assert "the simplest, within 5 % of the fastest: recompute" in told
    assert f"the fastest that fits: {MIXED}" in told


class Simulated:
    """Stands for the simulator: memory is proportional to the tokens, and a quarter of it on a 4-bit base."""

    builds_model = True

    def __init__(self, job: Job, weights: int = 16) -> None:
        self.job = job
        self.weights = weights
        self.estimates = 0

    def change_job(self, job: Job) -> None:
        self.job = job

    @property
    def summary(self):
        weights = (
            self.weights / (4 if self.job.base == "4bit" else 1) / (self.job.ranks if self.job.shards_weights else 1)
        )
        return dataclasses.replace(make_plan(GIB).summary, resident_bytes=int(weights * GIB))

    def estimate(self, policy: str, *, exact: bool):
        assert not exact
        self.estimates += 1
        needed = self.summary.resident_bytes + self.job.tokens * GIB // 1024
        return dataclasses.replace(make_plan(GIB).candidates[0].estimate, policy=policy, needed_bytes=needed)


def ask(job: Job, **settings: Any) -> tuple[list[WayOut], str | None, Simulated]:
    simulated = Simulated(job, settings.pop("weights", 16))
    question = {"budget": 20 * GIB, "host_budget": 2 * CARD.memory, "headroom": 0.05, **settings}
    ways, none_helps = find_ways_out(Question(simulated, job, CARD, "recompute", **question), lambda _: None)
    return ways, none_helps, simulated


def test_ways_out_are_tried_from_the_smallest_change_on():
    ways, none_helps, _ = ask(Job(tokens=8192), budget=CARD.memory // 2)
    assert [way.change for way in ways] == [
        {"lora": 16, "base": "4bit"},
        {"ranks": 2, "engine": "fsdp2"},
        {"tokens": 4096},
        {"budget": "26GiB"},
    ]
    assert none_helps is None
    assert str(WayOut(change={"lora": 16}, policy="recompute", device_bytes=GIB)) == "lora=16: 1 GiB with recompute"


def test_a_larger_device_is_larger_than_the_card_and_not_than_the_budget():
    for budget in (20 * GIB, CARD.memory):
        ways, _, _ = ask(Job(tokens=50 * 1024), budget=budget)
        assert ways[-1].change == {"device": "H100"}
    ways, _, _ = ask(Job(tokens=25 * 1024 + 512), budget=20 * GIB)
    assert ways[-1].change == {"budget": None}, "all of the card"
    ways, _, _ = ask(Job(tokens=50 * 1024), host_budget=GIB, known=None)
    assert "device" in ways[-1].change, "this step needs no host memory"


def test_four_bits_are_offered_under_fsdp2():
    job = Job(tokens=8192, lora=16, ranks=2, engine="fsdp2")
    ways, _, _ = ask(job, budget=14 * GIB)
    assert {"base": "4bit"} in [way.change for way in ways]
    ways, _, _ = ask(dataclasses.replace(job, engine="zero3"), budget=14 * GIB)
    assert {"base": "4bit"} not in [way.change for way in ways], "a job refuses it"


def test_where_nothing_helps_it_is_said_what_was_tried():
    ways, none_helps, simulated = ask(Job(tokens=2048), budget=GIB, weights=900)
    assert ways == []
    assert none_helps == (
        "no change that was tried makes it fit: optimizer=adamw8bit, lora=16, lora=16 with base=4bit, ranks=2 with "
        "engine=fsdp2, ranks=4 with engine=fsdp2, ranks=8 with engine=fsdp2, fewer tokens, a larger device"
    )
    assert simulated.estimates == 0, "no device has room for the weights"


def test_figures_that_are_known_are_not_simulated_again():
    known = Simulated(Job(tokens=50 * 1024)).estimate("recompute", exact=False)
    before = ask(Job(tokens=50 * 1024))[2].estimates
    assert ask(Job(tokens=50 * 1024), known=known)[2].estimates == before - 1


def test_shares_and_durations_are_read_and_written_as_people_do():
    assert [parse_share(share) for share in ("5%", "0.1", 0.0)] == [0.05, 0.1, 0.0]
    for wrong in ("5", "-1%", "much", True, 1.0):
        with pytest.raises(InvalidValueError, match="is not a share"):
            parse_share(wrong)
    assert [format_seconds(seconds) for seconds in (4.5e-5, 0.0123, 0.9997, 1.95, 599, 1950)] == [
        *("45 µs", "12.3 ms", "1,000 ms", "1.95 s", "599 s", "32.5 min")
    ]
