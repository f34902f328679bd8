"""Prints for all verbs: formats, files, notes, and the one line that says why a command could not run."""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from lowtide.targets import FORMS

if TYPE_CHECKING:
    from pathlib import Path


class Command(TyperCommand):
    """A verb whose help shows no type for flags: they take no value."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


class Group(TyperGroup):
    """The command itself, whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


def _without_types_of_flags(parameters: Any) -> Any:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and not parameter.metavar:
            parameter.metavar = " "
    return parameters


MODEL_HELP = (
    f"The model: {FORMS}. A factory returns (model, batch), (model, batch, options) with keywords of lowtide.audit, or "
    "a transformers model alone."
)
"""How `plan` and `audit` explain what they take."""

COULD_NOT_RUN = 2
"""The exit code of a command that has no answer; 0 and 1 are answers."""


class Format(enum.StrEnum):
    """How a result is printed. Each verb offers some of these."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"
    REPORT = "report"
    JUNIT = "junit"
    GITHUB = "github"
    ISSUE = "issue"


def format_option(what: str, *formats: Format) -> Any:
    """Return the option `--format` of a verb that prints `what` in these formats."""

    def parse(word: str) -> Format:
        if word not in formats:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(formats)}.")
        return Format(word)

    return typer.Option("--format", parser=parse, metavar=f"<{'|'.join(formats)}>", help=f"How to print {what}.")


def give_up(message: str, code: int = COULD_NOT_RUN) -> NoReturn:
    """Print one line on stderr and exit. Brackets in the message are text, not markup."""
    Console(stderr=True).print(f"[red]error[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def note(message: str) -> None:
    """Print one line on stderr that the reader of the result should know."""
    Console(stderr=True).print(f"[yellow]note[/] {escape(message)}", soft_wrap=True)


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether a parameter stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_unused(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Give up if one of these options was given: here it would do nothing."""
    for name in names:
        if is_given(context, name):
            option = next(option for option in context.command.params if option.name == name)
            give_up(f"{option.opts[0]} {why}")


def check_output(to: Path | None) -> None:
    """Give up before the work starts if the result could not be written to this file."""
    if to is None:
        return
    if to.is_dir():
        give_up(f"{to} is a directory: name a file in it")
    if not to.parent.is_dir():
        give_up(f"{to} cannot be written: there is no directory {to.parent}")
    if not os.access(to if to.exists() else to.parent, os.W_OK):
        give_up(f"{to} cannot be written: no permission")


def write(text: str, to: Path | None) -> None:
    """Write a result to a file, or to stdout."""
    if to is None:
        typer.echo(text)
        return
    try:
        to.write_text(text)
    except OSError as error:
        give_up(f"{to} cannot be written: {error.strerror}")
    Console(stderr=True).print(f"written to {escape(str(to))}", soft_wrap=True)


def print_paragraph(console: Console, text: str) -> None:
    """Print markup that is wrapped at words in a terminal, and kept on one line in a pipe, where programs read it."""
    console.print(text, soft_wrap=not console.is_terminal)
