"""Puts the `lowtide` command together. Each verb is a module of this package, and only prints what a room returns."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lowtide._version import __version__
from lowtide.cli.audit import audit
from lowtide.cli.demo import demo
from lowtide.cli.doctor import doctor
from lowtide.cli.output import Command, Group
from lowtide.cli.plan import calibrate, plan
from lowtide.cli.policies import policies
from lowtide.cli.selftest import selftest
from lowtide.cli.trace import trace

if TYPE_CHECKING:
    from collections.abc import Iterator

app = typer.Typer(
    name="lowtide",
    cls=Group,
    help="Keep the activation memory of PyTorch training low, and prove that the gradients are still right.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(demo)
app.command(cls=Command)(audit)
app.command(cls=Command)(doctor)
app.command(cls=Command)(plan)
app.command(cls=Command)(policies)
app.command(cls=Command)(trace)
app.command(cls=Command)(calibrate)
app.command(cls=Command)(selftest)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowtide {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the library's log on stderr.")] = False,
) -> None:
    if verbose:
        context.with_resource(_log_to_stderr())


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Send the library's log to stderr, so that stdout holds the answer alone. Other loggers are left as they are."""
    from rich.logging import RichHandler

    logger = logging.getLogger("lowtide")
    handler, level = RichHandler(console=Console(stderr=True), show_path=False), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
