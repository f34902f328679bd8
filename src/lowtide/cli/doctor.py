"""`lowtide doctor`: prints the diagnosis as tables, or as JSON for a bug report."""

from __future__ import annotations

import importlib
import itertools
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from lowtide.cli.output import Format, format_option, give_up

if TYPE_CHECKING:
    from lowtide.doctor import Diagnosis, Hazard

_COLOURS = {"error": "red", "warning": "yellow", "note": "blue"}


def doctor(
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import this first, as your training script does: some packages patch torch when they are imported. "
            "Can be given several times.",
        ),
    ] = None,
    output: Annotated[Format, format_option("the diagnosis", Format.TEXT, Format.JSON)] = Format.TEXT,
) -> None:
    """Show versions, accelerator, memory, disk and compiler, and warn about known traps.

    Nothing is changed and nothing is compiled.

    Exit code 0: Lowtide can work here (there may be warnings). 1: it cannot.
    2: a module given with [bold]--import[/] could not be imported.

    Does importing unsloth patch torch's checkpoint?  [bold]lowtide doctor --import unsloth[/]
    """
    from lowtide.doctor import examine

    for module in imports or []:
        _import(module)
    diagnosis = examine()
    if output is Format.JSON:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        _print_text(diagnosis)
    raise typer.Exit(0 if diagnosis.ok else 1)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  (whatever a package raises when it is imported)
        give_up(f"importing {module} failed: {type(error).__name__}: {error}")


def _print_text(diagnosis: Diagnosis) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=1000)  # in a pipe, each fact is a line, and a path is whole
    table = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")  # a path is wrapped, never cut
    for group, facts in itertools.groupby(diagnosis.facts, key=lambda fact: fact.group):
        table.add_row(f"[bold]{group}[/]")
        for fact in facts:
            table.add_row(f"  {fact.name}", escape(fact.value), f"[dim]{escape(fact.note)}[/]")
    console.print(table)
    console.print()
    for hazard in diagnosis.hazards:
        console.print(_paragraph(hazard))
    console.print(_verdict(diagnosis))


def _verdict(diagnosis: Diagnosis) -> str:
    """Say in one line whether Lowtide can work here."""
    errors = [hazard.title for hazard in diagnosis.hazards if hazard.severity == "error"]
    if errors:
        return f"[red]Lowtide cannot work here:[/] {escape(errors[0])}."
    traps = len(diagnosis.hazards)
    rest = f"but {traps} known {'trap is' if traps == 1 else 'traps are'} described above" if traps else "no known trap"
    return f"[green]Lowtide works here[/], {rest}."


def _paragraph(hazard: Hazard) -> Padding:
    heading = f"[{_COLOURS[hazard.severity]}]{hazard.severity}[/]  [bold]{escape(hazard.title)}[/]"
    return Padding(f"{heading}\n{escape(hazard.detail)}\nRemedy: {escape(hazard.remedy)}", (0, 0, 1, 0))
