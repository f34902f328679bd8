"""What the driver and the page ask of a section."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Protocol

from bench.figures import Figure, Result, Rows, path_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Say = Callable[[str, int, int], None]
    """Told what is being measured, how many measurements are done, and how many there are."""

NAMES = ("overhead", "compiled", "selective", "freed", "virtual_clock", "tiling", "attention", "loss", "disk", "tools")
"""In the order in which they run and are shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars:
    """A plot of one figure of every row that has it."""

    name: str
    title: str
    figure: str
    verdict: str = ""
    """A figure that stands beside the bar of a row that it finds fault with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
    """A plot of several figures of some rows: one line for each row."""

    name: str
    title: str
    figures: dict[str, str]
    """By figure: what stands on the horizontal axis."""
    rows: tuple[str, ...]
    axis: str
    against: str = "plain"
    """The row that all others are divided by; with `""`, none is, and the plot begins at zero."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rivalry:
    """Rows that do the same job, and figures that say who does it with less."""

    ours: str
    theirs: tuple[str, ...]
    figures: tuple[str, ...]
    if_right: dict[str, str] = dataclasses.field(default_factory=dict)
    """By figure: the verdict without which theirs does not count."""


class Section(Protocol):
    """A module of `bench.sections`."""

    TITLE: str
    ABOUT: str
    """What is measured and how, for the page; `{name}` is filled in from the setting."""
    COLUMNS: dict[str, str]
    """By figure: its title in tables."""
    PLOTS: tuple[Bars | Lines, ...]
    RIVALRIES: tuple[Rivalry, ...]

    @staticmethod
    def measure(say: Say) -> Result: ...


def section(name: str) -> Section:
    return importlib.import_module(f"bench.sections.{name}")


def stored(name: str) -> Result | None:
    """The section's result of an earlier run."""
    path = path_of(name)
    read = getattr(section(name), "from_text", Result.from_text)
    return read(path.read_text()) if path.exists() else None


def keep_going(runs: dict[str, Callable[[], dict[str, Figure]]], say: Say) -> tuple[Rows, dict[str, str]]:
    """Every run's figures; a run that cannot is left out, with what it said."""
    from bench.apart import CannotRunError

    rows: Rows = {}
    left_out = {}
    for done, (name, run) in enumerate(runs.items()):
        say(name, done, len(runs))
        try:
            rows[name] = run()
        except (CannotRunError, ImportError) as error:
            left_out[name] = str(error)
    return rows, left_out
