"""`lowtide demo`: shows the whole story, on any machine."""

from __future__ import annotations

import importlib.util

from rich.console import Console

from lowtide.cli.output import give_up

_NEEDED = ("transformers", "peft", "ninja")
_FAILED = 1


def demo() -> None:
    """Watch it work without a GPU: a run that does not fit is made to fit, audited, run on two ranks, and planned.

    It takes under three minutes, and everything that it prints is measured while
    it runs. It needs a C++ compiler and
    [bold]pip install 'lowtide\\[sim,hf]'[/].
    """
    from lowtide.errors import LowtideError

    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        give_up(f"the demo needs {', '.join(missing)}: pip install 'lowtide[sim,hf]'", _FAILED)
    from lowtide.demo.story import tell

    try:
        tell(Console(highlight=False))
    except LowtideError as error:
        give_up(str(error), _FAILED)
