"""`lowtide demo`: the whole story, on any machine."""

from __future__ import annotations

import importlib.util

import typer
from rich.console import Console
from rich.markup import escape

_NEEDED = ("transformers", "peft", "ninja")


def demo() -> None:
    """Watch it work, without a GPU: a run that does not fit, and does; the proof; two ranks; a plan at full size.

    Takes under three minutes. Everything that it prints is measured while it runs. It needs a C++ compiler and
    [bold]pip install 'lowtide\\[sim,hf]'[/].
    """
    from lowtide.errors import LowtideError

    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"the demo needs {', '.join(missing)}: pip install 'lowtide[sim,hf]'")
    from lowtide.demo.story import tell

    try:
        tell(Console(highlight=False))
    except LowtideError as error:
        _fail(str(error))


def _fail(message: str) -> None:
    Console(stderr=True).print(f"[red]error[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(1)
