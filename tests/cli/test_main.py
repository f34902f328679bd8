from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lowtide import __version__
from lowtide.cli import app


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


def test_unknown_words_are_refused(run):
    assert run("docter").exit_code == 2
    assert run("doctor", "--format", "yaml").exit_code == 2
