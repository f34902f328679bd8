"""`lowtide trace` on the command line."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from lowtide.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, ["trace", *arguments])


def test_a_step_is_traced_under_a_policy():
    data = json.loads(run("models.own:small", "--policy", "recompute", "--format", "json").stdout)
    assert data["peak_bytes"] > 0
    assert {region["recomputes"] for region in data["regions"]} == {1}
    assert "recomputes 0" in run("models.own:small").stdout


def test_tiles_that_run_again_are_no_recomputes():
    data = json.loads(run("models.own:small", "--policy", "tile(mlp, tokens=1)", "--format", "json").stdout)
    assert {region["recomputes"] for region in data["regions"]} == {0}
    assert all(region["tile_reruns"] > 1 for region in data["regions"])


def test_what_cannot_be_traced_is_one_line():
    for arguments, message in (
        (("llama",), "is not MODULE:FACTORY"),
        (("models.own:no_such",), "cannot be imported"),
        (("models.own:small", "--policy", "recompte"), "did you mean 'recompute'"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
