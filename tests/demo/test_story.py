"""The demo's acts, at a size for tests. Each of them judges itself: here it must also be able to say no."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lowtide.demo import story, training
from support.foreign_warnings import ignore_warnings_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def console(sim, monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(training, "LAYERS", 2)
    monkeypatch.setattr(training, "TOKENS", 192)
    return Console(record=True, width=120, file=io.StringIO())


@ignore_warnings_of("peft", "torch", "transformers")
def test_only_ours_fits_and_learns(console):
    story.fits(console)
    told = console.export_text()
    assert told.count("out of memory") >= 2
    assert "recompute+offload: 6 regions" in told
    assert "recomputes 6" in told


@ignore_warnings_of("peft", "torch", "transformers")
def test_a_policy_without_effect_is_told(console, monkeypatch):
    monkeypatch.setitem(story.WAYS, story.OURS, training.plain)
    with pytest.raises(story.DemoError, match="should fit and learn"):
        story.fits(console)


@ignore_warnings_of("peft", "torch", "transformers")
def test_the_audit_agrees(console):
    story.is_right(console)
    told = console.export_text()
    assert "bit-identical" in told
    assert "no check failed" in told


def test_two_ranks_agree_where_the_reentrant_engine_fails(console):
    story.on_two_ranks(console)
    told = console.export_text()
    assert "gradients are the same on all ranks" in told
    assert "Expected to mark a variable ready only once" in told


def test_ranks_that_hang_end_the_demo(console, monkeypatch):
    monkeypatch.setattr(story, "PATIENCE", 0.2)
    with pytest.raises(story.DemoError, match="gave no result within 0 s"):
        story.on_two_ranks(console)


def test_the_plan_is_kept_for_the_command_that_asks_the_same(monkeypatch):
    """What the demo has simulated, README's command then finds at once."""
    asked = {}

    def plan(**settings: object):
        asked.update(settings)
        raise story.DemoError("that is enough")

    monkeypatch.setattr(story.lowtide, "plan", plan)
    with pytest.raises(story.DemoError, match="enough"):
        story.at_full_size(Console(file=io.StringIO()))
    assert asked.pop("progress")
    assert asked == story.FULL_SIZE, "the cache is used, and nothing else is asked"
    options = [f"--{name.replace('_', '-')} {value}" for name, value in asked.items() if name != "model"]
    assert f"$ lowtide plan {asked['model']} {' '.join(options)}\n" in (ROOT / "README.md").read_text()
