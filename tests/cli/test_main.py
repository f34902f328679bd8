from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from lowtide import __version__, doctor
from lowtide.cli import app

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, arguments)


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"lowtide {__version__}"


def test_without_arguments_it_teaches(run):
    result = run()
    assert "doctor" in result.output
    assert "gradients" in result.output


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_a_verb_says_what_exit_codes_mean(run, flag):
    result = run("doctor", flag)
    assert result.exit_code == 0
    assert "Exit code 0" in result.output
    assert "--import" in result.output


def test_what_the_library_logs_is_shown_beside_the_answer(run, monkeypatch: pytest.MonkeyPatch):
    examine = doctor.examine

    def examine_and_tell():
        logging.getLogger("lowtide.part").debug("told")
        logging.getLogger("another").warning("not ours")
        return examine()

    monkeypatch.setattr(doctor, "examine", examine_and_tell)
    root, ours = logging.getLogger(), logging.getLogger("lowtide")
    before = (root.level, [*root.handlers], ours.level, [*ours.handlers])
    result = run("-v", "doctor", "--format", "json")
    assert json.loads(result.stdout)["facts"]
    assert "told" in result.stderr
    assert "not ours" not in result.stderr
    assert (root.level, [*root.handlers], ours.level, [*ours.handlers]) == before


@pytest.mark.parametrize("verb", [("plan", "llama", "--device", "L40S"), ("audit", "llama"), ("calibrate",)])
def test_a_place_that_cannot_be_written_is_told_before_the_work(run, verb: tuple[str, ...], tmp_path: Path):
    for place, why in ((tmp_path / "no/such/r.json", "there is no directory"), (tmp_path, "is a directory")):
        result = run(*verb, "-o", str(place))
        assert result.exit_code == 2
        assert why in result.stderr
        assert len(result.stderr.splitlines()) == 1, "no work, no traceback"


def test_unknown_words_are_refused(run):
    assert run("docter").exit_code == 2
    assert run("doctor", "--format", "yaml").exit_code == 2
