"""What the verbs share: how text goes out, and how a command says that it cannot go on."""

from __future__ import annotations

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


def write(text: str, to: Path | None) -> None:
    """To a file, or to stdout."""
    if to is None:
        typer.echo(text)
        return
    to.write_text(text)
    Console(stderr=True).print(f"written to {escape(str(to))}", soft_wrap=True)
