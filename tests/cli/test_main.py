from __future__ import annotations

import itertools
import json
import logging
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from lowtide import __version__, doctor
from lowtide.cli import app

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


VERBS = [(), *([command.callback.__name__] for command in app.registered_commands)]


@pytest.mark.parametrize("verb", VERBS, ids="".join)
def test_help_shows_no_type_of_flags(run, verb, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = run(*verb, "--help").stdout
    assert "--help" in shown
    assert "<bool>" not in shown
    assert "boolean" not in shown.lower()


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


def commands_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield every `lowtide ...` command of a page, in code and in text, with its words."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    blocks = re.findall(r"```(?:bash|console|sh)\n(.*?)```", text, flags=re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in (*itertools.chain.from_iterable(map(str.splitlines, blocks)), *spans):
        if found := COMMAND.match(" ".join(line.split())):
            yield line, shlex.split(ELIDED.sub("", found["words"]), comments=True)


COMMAND = re.compile(r"^(\$ )?(uvx (--from \S+ )?)?(\.venv/bin/)?lowtide (?P<words>(-v )?[a-z].*)")
ELIDED = re.compile(r"(--\S+ )?(…|\.\.\.)|--engine ENGINE")
"""What stands for words that a page does not name, or for an option's value."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_are_taken_by_the_parser(page: Path):
    group = typer.main.get_command(app)
    for line, words in commands_of(page):
        try:
            group.parse_args(group.make_context("lowtide", [], resilient_parsing=True), words)
            verb, *rest = words[1:] if words[0] == "-v" else words
            command = group.commands[verb]
            if rest:  # else it is the name of a command, not a call
                command.make_context(verb, rest)
        except Exception as error:  # (which class is Typer's business: some versions bring their own click)
            raise AssertionError(f"{page.name}: {line}: {error}") from error


def test_the_pages_have_commands():
    assert sum(len(list(commands_of(page))) for page in PAGES) > 60


def test_unknown_words_are_refused(run):
    assert run("docter").exit_code == 2
    assert run("doctor", "--format", "yaml").exit_code == 2
