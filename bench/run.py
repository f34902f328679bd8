"""Lowtide beside its peers, in figures: `make bench`.

    python -m bench.run                     # every section, beside the stored results
    python -m bench.run loss tiling         # some
    python -m bench.run --store             # and store what was found, and write the page

Each section runs in a fresh process. What is counted must come out as stored: else the exit code is 1. What is noisy is
marked as changed if it leaves its band. Nothing is overwritten without `--store`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import peers
from bench.comparing import BAND, differences
from bench.environment import environment
from bench.figures import Result, path_of
from bench.section import NAMES, section, stored
from bench.tables import table

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

CONSOLE = Console(width=None if sys.stdout.isatty() else 200)


def measure(name: str, progress: Progress) -> Result | None:
    """Return a section's result from a separate process, or None if that process died; it has said why."""
    task = progress.add_task(name, total=None, what="")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_here, args=(name, sender))
    process.start()
    sender.close()
    result = None
    try:
        while result is None:
            message = receiver.recv()
            if isinstance(message, Result):
                result = message
            else:
                what, done, total = message
                progress.update(task, what=what, completed=done, total=total)
    except EOFError:
        progress.update(task, what="failed")
    process.join()
    if result is not None:
        progress.update(task, what="", completed=1, total=1)
    return result


def _measure_here(name: str, sender: Connection) -> None:
    os.environ |= peers.ENVIRONMENT
    warnings.simplefilter("ignore")
    around = environment()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # peers write files where they are imported
        result = section(name).measure(lambda *message: sender.send(message))
    result.environment = result.environment or around
    sender.send(result)


def show(name: str, result: Result) -> None:
    header, *lines = table(section(name), result)
    drawn = Table(*header, title=section(name).TITLE, title_justify="left")
    drawn.columns[0].min_width = min(24, max(len(line[0]) for line in lines))
    for line in lines:
        drawn.add_row(*line)
    CONSOLE.print(drawn)
    for who, why in result.left_out.items():
        CONSOLE.print(f"[yellow]{who} cannot run here:[/] {why}")


def compare(name: str, result: Result) -> bool:
    """Says what differs from the stored result; whether everything that is counted is as it was."""
    before = stored(name)
    if before is None:
        CONSOLE.print(f"{name}: nothing is stored yet")
        return True
    found = differences(before, result)
    for one in found:
        mark = "[bold red]COUNT CHANGED[/]" if one.is_failure else f"[yellow]changed by more than {BAND:.0%}[/]"
        CONSOLE.print(f"{mark} {name}: {one}")
    if not found:
        CONSOLE.print(f"[green]{name}: as stored[/]")
    return not any(one.is_failure for one in found)


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(NAMES)}; all without it.")] = None,
    store: Annotated[bool, typer.Option(help="Overwrite the stored results, and write the page.")] = False,
) -> None:
    """Measure, show, and compare with what is stored."""
    chosen = names or list(NAMES)
    if unknown := set(chosen) - set(NAMES):
        raise typer.BadParameter(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[what]}"), console=CONSOLE) as progress:
        fine = [one(name, progress, store=store) for name in chosen]
    if store:
        from bench import page

        page.write()
    sys.exit(0 if all(fine) else 1)


def one(name: str, progress: Progress, *, store: bool) -> bool:
    """Whether a section ran and its counts are those stored, or are to be stored now."""
    result = measure(name, progress)
    if result is None:
        CONSOLE.print(f"[bold red]{name} failed[/]")
        return False
    show(name, result)
    is_as_stored = compare(name, result)
    if store:
        path_of(name).write_text(result.as_json())
    return is_as_stored or store


if __name__ == "__main__":
    typer.run(main)
