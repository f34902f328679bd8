"""Plans of a data set's own lengths: counting batches, and one run of the command."""

from __future__ import annotations

import itertools
import json

import pytest
from typer.testing import CliRunner

from lowtide.cli import app
from lowtide.errors import InvalidValueError
from lowtide.planning.lengths import longest_chances, longest_of, mean_step, read_lengths
from support import needs_transformers_5

LENGTHS = [700, 40, 40, 130, 2048, 512, 512, 90]


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_the_mean_is_that_of_all_batches(batch):
    def seconds(length):
        return 1e-3 * length + 1e-7 * length**2 + 0.1

    batches = [max(chosen) for chosen in itertools.combinations(LENGTHS, batch)]
    step = mean_step(LENGTHS, batch, "recompute", seconds)
    assert sum(longest_chances(LENGTHS, batch).values()) == pytest.approx(1)
    assert step.padded == pytest.approx(sum(batches) / len(batches))
    assert step.padding == pytest.approx(1 - sum(LENGTHS) / len(LENGTHS) / step.padded)
    exact = sum(seconds(max(length, 64)) for length in batches) / len(batches)
    assert step.seconds == pytest.approx(exact, rel=0.01)
    assert step.simulated[-1] == (2048, seconds(2048))
    assert len(step.simulated) <= 6


def test_sequences_of_one_length():
    step = mean_step([512] * 9, 4, "recompute", lambda length: length / 1000)
    assert (step.simulated, step.seconds, step.padding) == ([(512, 0.512)], pytest.approx(0.512), pytest.approx(0))


def test_lengths_are_those_of_parts():
    step = mean_step([1001, 100], 1, "recompute", float, parts=4)
    assert all(length % 4 == 0 for length, _ in step.simulated)
    assert step.simulated[-1][0] == longest_of([1001, 100], 4) == 1004


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "has no lengths"), ("12\nmany\n", "line 2: .*many"), ("12\n\n0\n", "line 3: a sequence has 1 token or more")],
)
def test_files_that_are_refused(tmp_path, text, says):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(InvalidValueError, match=says):
        read_lengths(tmp_path / "lengths")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidValueError, match="cannot read lengths from"):
        read_lengths(tmp_path / "none")


def test_a_batch_of_more_than_all():
    with pytest.raises(InvalidValueError, match="8 sequences do not make a batch of 9"):
        mean_step(LENGTHS, 9, "recompute", float)


@pytest.fixture
def files(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 8000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "lengths").write_text("2048\n\n1k\n1300\n")
    return str(tmp_path / "config.json"), str(tmp_path / "lengths")


def run(*args):
    return CliRunner().invoke(app, ["plan", *args])


@pytest.mark.slow
@needs_transformers_5
def test_the_command(files):
    config, lengths = files
    done = run(
        config, "--device", "H100", "--lengths", lengths, "--policy", "recompute", "--format", "json",
        "--no-cache",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["job"]["tokens"] == 2048
    step = plan["mean_step"]
    assert (step["sequences"], step["longest"], step["policy"]) == (3, 2048, "recompute")
    assert 0 < step["seconds"] < plan["step_seconds"]
    assert step["simulated"][-1] == [2048, plan["step_seconds"]]
    assert plan["notes"][0].startswith(
        "3 sequences, the longest of 2,048 tokens. Under recompute, a step of the longest"
    )


@pytest.mark.parametrize("other", [["--tokens", "8k"], ["--longest"], ["--largest-batch"]])
def test_two_questions_are_refused(files, other):
    done = run(files[0], "--lengths", files[1], *other)
    assert done.exit_code == 2
    assert "--lengths" in done.output
