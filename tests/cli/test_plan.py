"""`lowtide plan` and `lowtide calibrate` on the command line."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import lowtide
from lowtide.cli import app
from lowtide.cli.policies import EXAMPLES, WORDS
from lowtide.units import format_bytes
from support import needs_transformers_5

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
    assert "--budget" in shorter
    assert "--budget" not in larger
    assert 0 < int(shorter[shorter.index("--tokens") + 1]) < 16 * 1024
    assert run(*shorter).exit_code == 0, "the command does what it says"


def test_a_4_bit_base_that_peft_prepared(config: str):
    options = ("--device", "T4", "--tokens", "64", "--lora", "4", "--4bit", "--policy", "recompute", "--format", "json")
    plain, prepared, twice = (
        json.loads(run(config, *options, *more).stdout)["candidates"][0]["estimate"]["owners"]["weights"]
        for more in ((), ("--kbit",), ("--double-quant",))
    )
    assert prepared > plain > twice


def test_a_budget_below_the_weights_is_refused_before_anything_is_simulated(config: str):
    result = run(config, "--tokens", "4k", "--device", "L40S", "--budget", "650MiB", "--no-cache", "--format", "json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not data["candidates"]
    assert data["peak_bytes"] == data["summary"]["resident_bytes"] > 0


def test_options_are_shown_without_types_that_a_flag_does_not_have():
    result = CliRunner().invoke(app, ["plan", "--help"])
    assert "<bool>" not in result.stdout.replace("--help    -h      <bool>", "")
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
