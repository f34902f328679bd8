"""`lowtide.plan` as a user calls it: other processes, caches, budgets, errors."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import transformers

import lowtide
from lowtide.errors import DoesNotFitError, InvalidValueError, PlanError, SilentNoOpError
from lowtide.hardware import accelerators
from lowtide.hardware.accelerators import find_accelerator, margins_for
from lowtide.planning.max_fit import find_max
from lowtide.simulation.region_costs import REGION_POLICIES
from lowtide.targets.job import Job
from models.planned import CONFIG
from support import needs_transformers_5

pytestmark = [needs_transformers_5, pytest.mark.usefixtures("cache")]

MARGINS = margins_for(find_accelerator("L40S"), ranks=1).total
LONG = transformers.LlamaConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000
)
UNIFORM = 2 * len(REGION_POLICIES)
"""Without tiles, and with a tiled loss; these sequences are too short for MLPs in tiles to make a difference."""


def workers() -> list[str]:
    """Planning processes that were started with this test's cache: others may plan on this machine, too."""
    mark = f"LOWTIDE_CACHE={os.environ['LOWTIDE_CACHE']}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            is_ours = mark in (process / "environ").read_bytes()
        except OSError:
            continue
        if is_ours and "lowtide.simulation.worker" in line:
            found.append(line)
    return found


def test_a_plan_finds_the_fastest_policy_that_fits_and_it_can_be_applied(cache: Path):
    told: list[str] = []
    plan = lowtide.plan(
        CONFIG, tokens="4k", device="L40S", budget="3.2GiB", progress=lambda what, _done, _total: told.append(what)
    )
    assert plan.fits
    assert plan.best.estimate.exact, "the winner was simulated whole"
    assert plan.best.device_bytes <= plan.budget
    assert plan.host_budget == 2 * find_accelerator("L40S").memory
    assert len(plan.candidates) >= UNIFORM
    for candidate in plan.candidates:
        assert candidate.verdict != "fits" or candidate.estimate.seconds >= plan.fastest.estimate.seconds
    assert plan.best.device_bytes <= plan.fastest.device_bytes <= 0.95 * plan.budget, "both leave the headroom"
    assert plan.step_seconds <= 1.05 * plan.fastest.estimate.seconds
    assert not any("tile(mlp, loss)" in candidate.policy for candidate in plan.candidates)
    assert any("tile(mlp, loss) is left out: no call is long enough" in note for note in plan.notes)
    assert plan.why_not_faster is not None
    assert "too much" in plan.why_not_faster or "less than a headroom of 5 %" in plan.why_not_faster
    assert sum(plan.owners.values()) == plan.peak_bytes
    assert len({point["bytes"]["weights"] for point in plan.timeline}) == 1, "weights stay until the step is over"
    assert json.loads(plan.to_json())["policy"] == plan.best.policy
    assert "recompute" in told
    assert any("4096 tokens are more than the 2048 positions" in note for note in plan.notes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIG)
    with lowtide.apply(model, plan.policy) as applied:
        assert len(applied.regions) == 8
    assert not workers()
    known = len(list(cache.iterdir()))
    assert known > UNIFORM
    again = lowtide.plan(CONFIG, tokens="4k", device="L40S", budget="3.2GiB")
    assert again == plan, "from the cache"
    assert len(list(cache.iterdir())) == known


def test_a_given_policy_is_the_only_one(cache: Path):
    plan = lowtide.plan(CONFIG, tokens=2048, device="H100", policy="recompute+tile(loss)", cache=False)
    assert [candidate.policy for candidate in plan.candidates] == ["recompute+tile(loss)"]
    assert plan.fits
    assert not cache.exists()


def test_a_budget_that_nothing_fits_says_what_the_least_is():
    plan = lowtide.plan(CONFIG, tokens=2048, device="L40S", budget="1.5GiB")
    assert not plan.fits
    assert plan.policy is None
    assert plan.least.device_bytes == min(candidate.device_bytes for candidate in plan.candidates)
    model = transformers.LlamaForCausalLM(CONFIG)
    before = dict(model.model.layers[0].__dict__)
    with pytest.raises(
        DoesNotFitError, match=r"no policy fits 1 GiB with .*: weights and the optimizer's states alone take 1.51 GiB"
    ):
        lowtide.apply(model, budget="1GiB", tokens=2048, device="L40S")
    assert model.model.layers[0].__dict__ == before


class TestRecomputeThatKeepsAttention:
    """Four narrow layers at 32k tokens: attention takes most of the time."""

    KEEPING = "recompute(keep=attention)"
    SETTINGS = MappingProxyType({"tokens": "32k", "device": "L40S", "budget": "2GiB", "host_budget": 0})

    def test_it_is_planned_where_attention_takes_the_time(self):
        plan = lowtide.plan(LONG, **self.SETTINGS)
        figures = {candidate.policy: candidate for candidate in plan.candidates}
        assert self.KEEPING in plan.best.policy
        assert not figures["none"].fits
        assert figures["recompute+tile"].fits
        assert plan.step_seconds < 0.9 * figures["recompute+tile"].estimate.seconds
        once, twice = (figures[f"{policy}+tile"].estimate.busy["attention"] for policy in (self.KEEPING, "recompute"))
        assert twice == pytest.approx(2 * once)

    def test_apply_takes_it(self):
        model = transformers.LlamaForCausalLM(LONG).to(torch.bfloat16)
        with lowtide.apply(model, **self.SETTINGS) as applied:
            rules = [applied.policy, *(rule for _, rule in applied.policy.overrides)]
            assert any(rule.keep == ("attention",) for rule in rules)

    def test_of_a_model_without_attention_the_rest_is_mixed(self):
        plan = lowtide.plan("models.own:small", device="L40S")
        assert not any("keep=" in candidate.policy for candidate in plan.candidates)
        (note,) = (note for note in plan.notes if f"left out: {self.KEEPING}" in note)
        assert "called no such operator" in note


def test_apply_takes_a_budget():
    model = transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    applied = lowtide.apply(model, budget="3.2GiB", tokens=4096, device="L40S")
    assert not applied.policy.is_none or applied.policy.overrides
    applied.remove()
    with pytest.raises(InvalidValueError, match="budget= needs tokens="):
        lowtide.apply(model, budget="3GiB")
    with pytest.raises(InvalidValueError, match="tokens: these describe a plan"):
        lowtide.apply(model, tokens=4096)
    with pytest.raises(InvalidValueError, match="a policy or a budget"):
        lowtide.apply(model, "recompute", budget="3GiB", tokens=8)
    with pytest.raises(InvalidValueError, match="regions= and budget="):
        lowtide.apply(model, budget="3GiB", tokens=8, regions=["model.layers.*"])


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        ("Qwen3-9B", {}, InvalidValueError, "did you mean Qwen3-8B"),
        ("llama", {"device": "L40"}, InvalidValueError, "did you mean 'L40S'"),
        ("./no_such/config.json", {}, InvalidValueError, "there is no ./no_such/config.json"),
        ("no_such_module:build", {}, PlanError, "no_such_module:build cannot be imported"),
        (42, {}, InvalidValueError, "a module, a configuration or a name"),
        ("vit", {}, PlanError, "no model that computes a language-modelling loss"),
        ("llama", {"budget": 0}, InvalidValueError, "a budget of 0 fits nothing"),
        ("llama", {"tokens": "64M"}, InvalidValueError, "more than a plan can simulate"),
        ("llama", {"headroom": "120%"}, InvalidValueError, "not a share: write it like 0.05 or '5%'"),
        ("llama", {"images": "4x512x512"}, PlanError, "takes no pictures"),
        ("llama", {"policy": "recompute+offload(disk=/scratch)"}, InvalidValueError, "no clock for"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(model: object, settings: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        lowtide.plan(model, **{"tokens": 512, "device": "L40S", "policy": "recompute", **settings})
    assert not workers()


def test_without_a_device_one_must_be_named():
    with pytest.raises(InvalidValueError, match="no GPU here to plan for"):
        lowtide.plan("llama", tokens=512)


class TestAPolicyThatDoesNothingToAModel:
    """Blocks whose saved tensors are too small to be moved."""

    def test_the_others_are_judged_and_a_note_says_so(self):
        plan = lowtide.plan("models.own:small", device="L40S")
        assert plan.fits
        assert [candidate.policy for candidate in plan.candidates if "offload" in candidate.policy] == []
        assert {c.policy for c in plan.candidates} == {"none", "recompute"}
        (note,) = (note for note in plan.notes if "left out: offload" in note)
        assert "left out: offload, recompute+offload, recompute(keep=attention)+offload (" in note
        assert "expected its saved tensors to be offloaded" in note
        assert "\n" not in note

    def test_one_that_is_asked_for_by_name_is_refused(self):
        with pytest.raises(SilentNoOpError, match="expected its saved tensors to be offloaded"):
            lowtide.plan("models.own:small", device="L40S", policy="offload")

    def test_the_longest_sequence_is_found_without_it(self):
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
        )
        card = dataclasses.replace(find_accelerator("L40S"), memory=MARGINS + 2**23)
        found = find_max(config, Job(tokens=8, batch_size=1), card, dimension="batch_size")
        assert {"none", "recompute"} <= {row.policy for row in found}
        assert not any("offload" in row.policy for row in found)
        with pytest.raises(SilentNoOpError):
            find_max(config, Job(tokens=8), card, dimension="batch_size", policies=["recompute+offload"])


class TestACacheThatCannotBeUsed:
    def test_a_result_is_not_lost_and_it_is_said_once(self, tmp_path: Path, monkeypatch, caplog):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file"))
        plan = lowtide.plan(CONFIG, tokens=512, device="L40S", policy="recompute")
        assert plan.fits
        (note,) = (note for note in plan.notes if "cannot be kept" in note)
        assert "(Not a directory): set LOWTIDE_CACHE" in note
        assert [record.getMessage() for record in caplog.records] == [note]

    def test_what_cannot_be_read_is_made_again(self, cache: Path):
        first = lowtide.plan(CONFIG, tokens=512, device="L40S", policy="recompute")
        for path in cache.iterdir():
            path.write_text("{half of a")
        assert lowtide.plan(CONFIG, tokens=512, device="L40S", policy="recompute") == first
        assert all(json.loads(path.read_text()) for path in cache.iterdir()), "and kept"


def test_a_calibration_is_honoured_however_the_device_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    card = find_accelerator("L40S")
    path = tmp_path / "calibration.json"
    measured = dataclasses.asdict(dataclasses.replace(card.efficiencies, matmul=0.1))
    path.write_text(json.dumps({"accelerator": "L40S", "efficiencies": measured}))
    monkeypatch.setattr(accelerators, "this_accelerator", lambda: card)
    for device, given in itertools.product(("L40S", card, None), (path, str(path))):
        assert accelerators.resolve_accelerator(device, given).efficiencies.matmul == 0.1


def test_the_longest_sequence_fits_and_a_longer_one_does_not():
    job = Job(tokens=1024, engine="single")
    card = dataclasses.replace(find_accelerator("L40S"), memory=4 * 2**30)
    (found,) = find_max(CONFIG, job, card, policies=["recompute+tile(loss)"])
    assert found.most % 1024 == 0
    assert found.device_bytes == found.estimate.needed_bytes + margins_for(card, job.ranks).total <= card.memory
    fits, longer = (
        lowtide.plan(CONFIG, tokens=tokens, device=card, policy="recompute+tile(loss)")
        for tokens in (found.most, int(found.most * 1.15) + 1024)
    )
    assert fits.fits
    assert not longer.fits
    (batch,) = find_max(
        CONFIG, dataclasses.replace(job, tokens=4096), card, dimension="batch_size", policies=["recompute+tile(loss)"]
    )
    assert 1 <= batch.most <= found.most // 4096 + 1


def test_the_longest_sequence_may_be_the_hosts_limit():
    card = dataclasses.replace(find_accelerator("L40S"), memory=3 * 2**30)
    (found,) = find_max(CONFIG, Job(tokens=1024, engine="single"), card, policies=["offload+tile(loss)"])
    _, host = card.budgets(None, None)
    assert 0.8 * host < found.estimate.host_bytes <= host
    longer = lowtide.plan(CONFIG, tokens=int(found.most * 1.3), device=card, policy="offload+tile(loss)")
    assert "of host memory" in longer.candidates[0].limit


def test_an_interrupt_leaves_no_process_and_no_half_of_a_result(cache: Path):
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
        "import lowtide; lowtide.plan('Qwen3-8B', tokens='32k', device='L40S')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=dict(os.environ))
    deadline = time.monotonic() + 120
    while not workers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert workers()
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors
    deadline = time.monotonic() + 20
    while workers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not workers()
    assert not cache.exists() or not [path for path in cache.iterdir() if path.suffix == ".part"]


def test_what_the_host_has_is_a_limit_that_is_told(cache: Path):
    plan = lowtide.plan(CONFIG, tokens="4k", device="L40S", policy="recompute+offload", host_budget="1MiB")
    assert not plan.fits
    assert "of host memory, and there are 1 MiB" in plan.candidates[0].limit
    assert any("offload may take 1 MiB of host memory per rank" in note for note in plan.notes)
