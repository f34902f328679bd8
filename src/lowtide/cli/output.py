"""What the verbs share: how text goes out, how progress is shown, and how a command says that it cannot go on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from pathlib import Path

COULD_NOT_RUN = 2
"""The exit code if there is no answer; 0 and 1 are answers."""


def give_up(message: str, code: int = COULD_NOT_RUN) -> NoReturn:
    """One line on stderr. Brackets in it are words, not markup."""
    Console(stderr=True).print(f"[red]error[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def refuse_unused(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """An option that was given and would do nothing."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            give_up(f"--{name.replace('_', '-')} {why}")


def check_output(to: Path | None) -> None:
    """Before the work: what will be written can be."""
    if to is None:
        return
    if to.is_dir():
        give_up(f"{to} is a directory: name a file in it")
    if not to.parent.is_dir():
        give_up(f"{to} cannot be written: there is no directory {to.parent}")
    if not os.access(to if to.exists() else to.parent, os.W_OK):
        give_up(f"{to} cannot be written: no permission")


def write(text: str, to: Path | None) -> None:
    """To a file, or to stdout."""
    if to is None:
        typer.echo(text)
        return
    try:
        to.write_text(text)
    except OSError as error:
        give_up(f"{to} cannot be written: {error.strerror}")
    Console(stderr=True).print(f"written to {escape(str(to))}", soft_wrap=True)
