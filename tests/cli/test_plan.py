"""`lowtide plan` and `lowtide calibrate` on the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import lowtide
from lowtide import planning
from lowtide.cli import app
from lowtide.cli.plan_table import print_largest
from lowtide.cli.policies import EXAMPLES, WORDS
from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import find_accelerator, resolve_accelerator
from lowtide.planning.max_fit import MaxFit
from lowtide.planning.result import WayOut
from lowtide.targets.job import Job, make_job
from lowtide.units import format_bytes
from support import needs_transformers_5
from support.sample_plans import make_plan

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_transformers_5

TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 8000,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_table_ends_with_the_line_to_paste(config: str):
    result = run(config, "--tokens", "4k", "--device", "L40S", "--budget", "1.4GiB")
    assert result.exit_code == 0, result.output
    assert re.search(r'lowtide\.apply\(model, ".+"\)', result.stdout)
    assert "why nothing faster" in result.stdout
    assert result.stdout.count("fits") >= 2
    assert "full fine-tuning, 1 x 4096 tokens" in result.stdout
    assert "the ranking is the claim" in " ".join(result.stdout.split())


def test_what_would_fit_is_printed_as_commands(config: str):
    result = run(
        *(config, "--tokens", "16k", "--device", "L40S", "--budget", "900MiB", "--optimizer", "sgd"),
        *("--policy", "recompute+offload+tile"),
    )
    assert result.exit_code == 1, result.output
    commands = [line for line in result.stdout.splitlines() if line.startswith("lowtide plan")]
    assert len(commands) == 2, result.stdout
    shorter, larger = (command.split()[2:] for command in commands)
    assert "900MiB" in shorter
    assert larger[larger.index("--budget") + 1].endswith("GiB"), "the same card has more"
    assert 0 < int(shorter[shorter.index("--tokens") + 1]) < 16 * 1024
    assert run(*shorter).exit_code == 0, "the command does what it says"


def questions(folder: Path) -> list[tuple[str, ...]]:
    """Questions with options that some change leaves no room for."""
    (folder / "lengths.txt").write_text("512\n2k\n")
    sheet = {"name": "mine", "memory": "20GiB", "half_tflops": 100, "single_tflops": 50}
    rates = {"bandwidth_gb": 800, "link_gb": 25, "network_gb": 25, "source": "a data sheet"}
    (folder / "sheet.json").write_text(json.dumps({**sheet, **rates}))
    card = find_accelerator("L40S")
    measured = {"accelerator": card.name, "efficiencies": dataclasses.asdict(card.efficiencies)}
    (folder / "calibration.json").write_text(json.dumps(measured))
    return [
        ("--device", "L40S", "--lengths", str(folder / "lengths.txt")),
        ("--device-file", str(folder / "sheet.json"), "--tokens", "4k", "--batch-size", "2"),
        ("--device", "L40S", "--calibration", str(folder / "calibration.json"), "--budget", "20GiB", "--exact"),
        ("--device", "L40S", "--lora", "8", "--lora-dtype", "bf16", "--lora-targets", "q_proj,v_proj"),
        ("--device", "L40S", "--ranks", "4", "--engine", "zero1", "--no-cache", "--format", "text"),
        ("--device", "L40S", "--ranks", "4", "--engine", "fsdp2", "--no-reshard", "--units", "ends"),
    ]


CHANGES = (
    *({"batch_size": 1}, {"optimizer": "adamw8bit"}, {"lora": 16}, {"lora": 16, "base": "4bit"}, {"base": "4bit"}),
    *({"ranks": 8, "engine": "fsdp2"}, {"tokens": 1024}, {"device": "H200"}, {"budget": "30GiB"}, {"budget": None}),
)


def test_every_command_that_is_printed_is_one_that_is_taken(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[dict] = []
    ways: list[WayOut] = []

    def plan(model: str, **settings: Any) -> lowtide.Plan:
        """Check the question as the real one does, and find ways out of it that the job allows."""
        asked.append(settings)
        resolve_accelerator(settings["device"], settings["calibration"])
        job = make_job(**{name: value for name, value in settings.items() if name in _OF_JOBS})
        ways.clear()
        for change in CHANGES:
            with contextlib.suppress(InvalidValueError):
                dataclasses.replace(job, **{name: value for name, value in change.items() if name in _OF_JOBS})
                ways.append(WayOut(change=change, policy="recompute", device_bytes=1))
        return dataclasses.replace(make_plan(2**30), candidates=[], best=None, fastest=None, ways_out=[*ways])

    monkeypatch.setattr(planning, "plan", plan)
    for question in questions(tmp_path):
        shown = run(config, *question)
        assert shown.exit_code == 1, shown.output
        given, changes = asked[-1], [way.change for way in ways]
        commands = [line for line in shown.stdout.splitlines() if line.startswith("lowtide plan")]
        assert len(commands) == len(changes) >= 5
        for command, change in zip(commands, changes, strict=True):
            result = CliRunner().invoke(app, shlex.split(command)[1:])
            assert result.exit_code == 1, (command, result.output)
            assert all(str(asked[-1][name]) == str(value) for name, value in change.items()), command
            told = ("progress", "on_candidate")
            differs = {name for name in given if asked[-1][name] != given[name] and name not in told}
            assert differs <= {*change, "calibration", "budget"}, "nothing else is another question"


_OF_JOBS = {field.name for field in dataclasses.fields(Job)}


def test_a_4_bit_base_that_peft_prepared(config: str):
    options = ("--device", "T4", "--tokens", "64", "--lora", "4", "--4bit", "--policy", "recompute", "--format", "json")
    plain, prepared, twice = (
        json.loads(run(config, *options, *more).stdout)["candidates"][0]["estimate"]["owners"]["weights"]
        for more in ((), ("--kbit",), ("--double-quant",))
    )
    assert prepared > plain > twice


def test_a_budget_below_the_weights_is_refused_before_anything_is_simulated(config: str):
    result = run(config, "--tokens", "4k", "--device", "L40S", "--budget", "580MiB", "--no-cache", "--format", "json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not data["candidates"]
    assert data["peak_bytes"] == data["summary"]["resident_bytes"] > 0


def test_help_lists_the_gpus():
    result = CliRunner().invoke(app, ["plan", "--help"])
    assert "RTX 4090" in result.stdout


def test_the_language_of_policies_is_explained_with_examples_that_hold():
    shown = CliRunner().invoke(app, ["policies"]).stdout
    for policy in (*WORDS, *EXAMPLES):
        lowtide.Policy.parse(policy)
        assert policy in shown


def test_json_and_html(config: str, tmp_path: Path):
    result = run(config, "--tokens", "4k", "--device", "L40S", "--budget", "1.4GiB", "--format", "json")
    data = json.loads(result.stdout)
    assert data["fits"]
    assert data["policy"]
    assert data["timeline"]
    page = tmp_path / "plan.html"
    result = run(
        config, "--tokens", "4k", "--device", "L40S", "--budget", "1.4GiB", "--format", "html", "-o", str(page)
    )
    assert result.exit_code == 0
    assert "The step over time" in page.read_text()


@pytest.mark.parametrize(
    ("function", "line"),
    [("build", "raise KeyError(count)"), ("model", "loss = x.no_such_thing"), ("no_such", "getattr(")],
)
def test_minus_v_shows_where_code_of_the_users_failed(
    function: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "failing_factories.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    question = ("plan", f"failing_factories:{function}", "--device", "L40S", "--policy", "none")
    told = CliRunner().invoke(app, ["-v", *question])
    assert told.exit_code == 2
    assert "(lowtide -v shows where)" in told.stderr
    assert line in told.stderr
    assert "Traceback" in told.stderr


FAILING = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)
        )

    def forward(self, x):
        loss = x.no_such_thing
        return loss

def model():
    return Model(), torch.ones(2, 4)

def build(count=2):
    raise KeyError(count)
"""


def test_exit_codes(config: str):
    assert run(config, "--device", "L40S", "--budget", "100MiB", "--policy", "recompute").exit_code == 1
    refused = run(config, "--device", "L4000")
    assert refused.exit_code == 2
    assert "unknown accelerator" in refused.stderr
    assert run("no-such-model", "--device", "L40S").exit_code == 2


def test_the_longest_sequence_of_one_policy(config: str):
    result = run(config, "--device", "T4", "--dtype", "fp16", "--budget", "2GiB", "--longest", "--policy", "recompute")
    assert result.exit_code == 0, result.output
    assert "recompute" in result.stdout
    assert "tile" not in result.stdout, "only the policy that was asked for"
    assert "each leaves 5 % of the memory free" in " ".join(result.stdout.split())
    assert run(config, "--device", "T4", "--longest", "--largest-batch").exit_code == 2
    assert run(config, "--device", "T4", "--longest", "--format", "html").exit_code == 2


@pytest.mark.parametrize("question", ["--longest", "--largest-batch"])
def test_exact_is_for_a_plan(config: str, question: str):
    refused = run(config, "--device", "T4", question, "--exact", "--policy", "recompute")
    assert refused.exit_code == 2
    assert "--exact is for a plan" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--longest", "--tokens", "128k"), "--tokens is what --longest finds"),
        (("--largest-batch", "--batch-size", "64"), "--batch-size is what --largest-batch finds"),
        (("--lora-dtype", "fp32"), "--lora-dtype is for adapters: give --lora 16"),
        (("--lora", "4", "--kbit"), "--kbit is about a 4-bit base: give --4bit too"),
        (("--lora", "4", "--double-quant"), "--double-quant is about a 4-bit base: give --4bit too"),
        (("--longest", "--budget", "0"), "a budget of 0 fits nothing"),
    ],
)
def test_an_option_without_effect_is_refused(config: str, options: tuple[str, ...], message: str):
    refused = run(config, "--device", "T4", "--policy", "recompute", *options)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("width", [72, 80, 120])
def test_policies_are_told_apart_however_narrow_the_terminal_is(
    config: str, width: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    result = run(config, "--tokens", "4k", "--device", "L40S", "--budget", "1.4GiB")
    table = result.stdout.partition("lowtide.apply")[0].splitlines()
    assert max(map(len, table)) <= width
    rows: list[str] = []
    for line in table:
        if line.startswith(("fits", "no ")):
            rows.append(line.split()[1])
        elif rows:
            rows[-1] += line[6 : 6 + max(28, width // 3)].strip()
    assert {"recompute+offload+tile(loss)", "recompute+tile(loss)"} <= set(rows)
    assert {"recompute(keep=attention)+offload+tile(loss)", "recompute(keep=attention)+tile(loss)"} <= set(rows)
    assert len(set(rows)) == len(rows)
    assert not [line for line in table if line.split()[-1:] == ["+"]], "a line is broken before a plus sign"
    assert ("at the peak" in result.stdout) == (width > 110), "a sentence, where there is room for one"
    assert any(line.endswith("too much") for line in table) == (72 < width < 110), "else a figure"
    assert "…" not in result.stdout, "nothing is cut"


@pytest.mark.parametrize("width", [72, 80])
@pytest.mark.parametrize("dimension", ["tokens", "batch_size"])
def test_the_table_of_longest_sequences_fits_a_narrow_terminal(width: int, dimension: str):
    sample = make_plan(2**30).candidates[0].estimate
    policies = ("none", "recompute+offload+tile(loss)", "recompute(keep=attention)+offload+tile(attention, mlp)")
    slow = dataclasses.replace(sample, host_bytes=100 * 2**30, seconds=12_345.0)
    found = [
        MaxFit(policy=policy, most=1_048_576, estimate=slow, device_bytes=79 * 2**30, positions=131_072)
        for policy in policies
    ]
    console = Console(width=width, file=io.StringIO(), highlight=False)
    print_largest([*found, MaxFit(policy="offload", most=0, estimate=None)], dimension, console, 0.05)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    parts = [line.split()[0] for line in lines if line.strip()]
    assert {"recompute(keep=attention)", "+offload+tile(attention,"} <= set(parts), "broken before a plus sign alone"
    assert "1,048,576*" in lines[1]
    assert "206 min" in lines[1]
    assert "each leaves 5 % of the memory free" in " ".join(" ".join(lines).split())


def test_both_tables_show_what_the_device_must_have(config: str):
    settings = (config, "--device", "T4", "--dtype", "fp16", "--budget", "2GiB", "--policy", "recompute")
    (row,) = json.loads(run(*settings, "--longest", "--format", "json").stdout)
    shown = run(*settings, "--longest").stdout
    planned = run(*settings, "--tokens", str(row["most"])).stdout
    device = format_bytes(row["device_bytes"])
    assert device in shown
    assert device in planned
    assert "peak" not in shown


def test_calibrating_needs_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    result = CliRunner().invoke(app, ["calibrate", "-o", str(tmp_path / "c.json")])
    assert result.exit_code == 2
    assert "run this on the machine that will train" in result.stderr
    assert not list(tmp_path.iterdir())


def test_adapters_are_of_the_type_that_is_asked_for(config: str):
    settings = ("--tokens", "1k", "--device", "L40S", "--lora", "8", "--policy", "none", "--format", "json")
    single, half = (json.loads(run(config, *settings, *more).stdout) for more in ((), ("--lora-dtype", "bf16")))
    assert [plan["job"]["lora_dtype"] for plan in (single, half)] == ["fp32", "bf16"]
    assert half["peak_bytes"] < single["peak_bytes"]
