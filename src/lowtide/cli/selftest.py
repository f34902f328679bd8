"""`lowtide selftest`: proves on the accelerator at hand what Lowtide claims."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lowtide.cli.output import check_output, give_up, note, print_paragraph, write
from lowtide.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.selftest import Record

_INTERRUPTED = 130
_COLOURS = {"pass": "green", "fail": "red", "untidy": "yellow", "inconclusive": "yellow", "not applicable": "dim"}


def selftest(
    device: Annotated[
        str | None,
        typer.Option(help="cuda, xpu, npu, mps, sim (emulated) or cpu. Default: this machine's accelerator."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer models, smaller ones and fewer steps.")] = False,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes, one per device, for DDP and FSDP2. Default: none of these.")
    ] = 1,
    to: Annotated[Path, typer.Option("--output", "-o", help="Where to write the record, after each stage.")] = Path(
        "lowtide-selftest.json"
    ),
    page: Annotated[Path | None, typer.Option("--html", help="Write the record as a page, too.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="<untidy|unsafe|no-effect|wrong>",
            help="The mildest grade of a failure that makes the exit code 1: untidy (a plan or a link is off), unsafe, "
            "no-effect (nothing is freed or hidden) or wrong (gradients, or a step that raises). Default: unsafe.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the record of a self-test that was interrupted.")
    ] = False,
) -> None:
    """Prove on this machine's accelerator that gradients are right, memory is freed, copies overlap and plans hold.

    It takes under ten minutes, and leaves a record that can be sent: it has
    versions, device and driver, but no host name, user or path.

    Exit code 0: nothing failed that counts (--fail-on). 1: something did, or
    the gradients are not proven. 2: the self-test could not run. What is not
    proven besides is named in the first line.

    Without an accelerator:  [bold]lowtide selftest --device sim --quick[/]
    """
    from lowtide.auditing.grades import Grade
    from lowtide.errors import LowtideError
    from lowtide.selftest import read_record, run

    check_output(to)
    check_output(page)
    try:
        earlier = read_record(to) if resume else None
        with _ended_in_order(), progress_bar(Console(stderr=True)) as show:
            record = run(
                device,
                quick=quick,
                ranks=ranks,
                fail_on=fail_on or Grade.UNSAFE,
                earlier=earlier,
                keep=lambda record: _keep(record, to),
                show=show,
            )
    except LowtideError as error:
        give_up(str(error))
    except KeyboardInterrupt:
        note(f"interrupted. What is finished is in {to}: the same command with --resume goes on from there")
        raise typer.Exit(_INTERRUPTED) from None
    _print(record)
    Console(stderr=True).print(f"written to {escape(str(to))}", soft_wrap=True)
    if page is not None:
        from lowtide.selftest.page import as_html

        write(as_html(record), page)
    raise typer.Exit(0 if record.ok else 1)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let a request to end, and a terminal that goes away, interrupt as Ctrl-C does: so that nothing stays behind."""
    wanted = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    taken = [number for number in wanted if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores one of them
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _keep(record: Record, to: Path) -> None:
    """Write the record so far, whole or not at all."""
    part = to.with_name(f"{to.name}.part")
    try:
        part.write_text(record.to_json())
        part.replace(to)
    except OSError as error:
        give_up(f"{to} cannot be written: {error.strerror}")
    finally:
        part.unlink(missing_ok=True)


def _print(record: Record) -> None:
    from lowtide.selftest.report import QUESTIONS, headline, word_for

    console = Console(highlight=False)
    console.print(f"[bold]{escape(headline(record))}[/]")
    console.print(f"[dim]{record.seconds:.0f} s, failures count from {record.fail_on} on[/]")
    for stage in record.stages:
        colour = _COLOURS[stage.verdict]
        console.print(f"\n[bold]{stage.name}[/]  {QUESTIONS[stage.name]} [{colour}]{word_for(stage)}[/]")
        for row in stage.rows:
            word = f"[{_COLOURS.get(row.label, 'red')}]{row.label}[/] " if row.label else ""
            print_paragraph(console, f"  {word}[dim]{escape(row.name)}:[/] {escape(row.summary)}")
        if stage.why:
            print_paragraph(console, f"  [dim]not run: {escape(stage.why)}[/]")
