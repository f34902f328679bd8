"""Shows how far a long command is: the one progress bar of `plan`, `audit --zoo` and `demo`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, RenderableType

_BAR = 20
"""Columns of the bar itself: with the counts and the clock, about 45 of 80 are left to say what is being done."""


Show = Callable[[str, int, int], None]
"""Tells a bar what is being done now, and how much of it is done: `show(what, done, total)`."""


@contextlib.contextmanager
def progress_bar(
    console: Console,
    what: str = "",
    *,
    total: int | None = None,
    shows_remaining: bool = False,
    above: Callable[[], RenderableType] | None = None,
) -> Iterator[Show]:
    """Show a bar inside, with the time that has passed or that remains, below what `above` returns; then both go.

    Nothing is shown where the console is not a terminal.
    """
    clock = TimeRemainingColumn() if shows_remaining else TimeElapsedColumn()
    columns = (BarColumn(_BAR), MofNCompleteColumn(), clock, TextColumn("{task.description}"))
    with _Below(above, *columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(what), total=total)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=escape(what), completed=done, total=total)

        yield show


class _Below(Progress):
    """A bar below something that changes."""

    def __init__(self, above: Callable[[], RenderableType] | None, *columns: ProgressColumn, **settings: Any) -> None:
        self._above = above  # before the first rendering
        super().__init__(*columns, **settings)

    def get_renderables(self) -> Iterable[RenderableType]:
        if self._above is not None:
            yield self._above()
        yield from super().get_renderables()
