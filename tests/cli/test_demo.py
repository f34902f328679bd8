"""`lowtide demo` on the command line."""

from __future__ import annotations

import importlib.util

import pytest
from typer.testing import CliRunner

from lowtide.cli import app
from lowtide.demo import story


def test_what_is_missing_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "needs peft: pip install 'lowtide[sim,hf]'" in result.stderr


@pytest.mark.slow
def test_the_whole_story(sim):
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, result.output
    assert "It fits on 8 x L40S with" in result.output
    assert result.output.splitlines()[-3:] == story.NEXT.splitlines()
