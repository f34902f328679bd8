"""`lowtide audit`: one model, or the whole zoo."""

from __future__ import annotations

import enum
import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lowtide.cli.output import COULD_NOT_RUN, check_output, give_up, refuse_unused, write

if TYPE_CHECKING:
    from lowtide.auditing import AuditReport
    from lowtide.targets.audited import Target
    from lowtide_zoo.records import Record

_COLOURS = {"pass": "green", "fail": "red", "inconclusive": "yellow", "not applicable": "dim"}
_OF_ONE = ("policy", "checks", "seed", "device")
_OF_ZOO = ("family", "workers", "timeout", "resume", "records")
_NO_ANSWER = ("failed to run", "timed out")
"""Of the zoo's records, those that say nothing about the engine; what is refused or cannot be built has its reason."""


class Format(enum.StrEnum):
    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"
    HTML = "html"
    GITHUB = "github"


class EngineName(enum.StrEnum):
    TRANSFORMERS = "transformers"
    LOWTIDE = "lowtide"


def audit(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            help="[bold]MODULE:FACTORY[/] (returns model, batch and, if you like, keywords of lowtide.audit), a model "
            "folder with a config.json, or a transformers model type such as [bold]llama[/].",
            show_default=False,
        ),
    ] = None,
    *,
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="What to judge: transformers' own flag in both modes, or lowtide.apply. Default: the flag of a "
            "transformers model in which nothing is switched on; any other model as it is."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Judge lowtide.apply with this policy, e.g. recompute+tile.")
    ] = None,
    checks: Annotated[
        str | None, typer.Option(help="Only these checks, comma-separated. An unknown name lists them all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, batch and dropout.")] = 0,
    device: Annotated[str | None, typer.Option(help="Move model and batch there first, e.g. cuda.")] = None,
    output: Annotated[Format, typer.Option("--format", help="How to print the report.")] = Format.TEXT,
    to: Annotated[Path | None, typer.Option("--output", "-o", help="Write the report to this file.")] = None,
    whole_zoo: Annotated[
        bool, typer.Option("--zoo", help="Audit every architecture of the installed transformers, tiny and random.")
    ] = False,
    family: Annotated[str, typer.Option(help="With --zoo: only model types that fit this glob.")] = "*",
    workers: Annotated[int, typer.Option(min=1, help="With --zoo: processes at a time.")] = 2,
    timeout: Annotated[float, typer.Option(help="With --zoo: seconds per architecture.")] = 240,
    resume: Annotated[bool, typer.Option(help="With --zoo: go on where the file of records ends.")] = False,
    records: Annotated[
        Path, typer.Option(help="With --zoo: a line of JSON per architecture goes there as it is done.")
    ] = Path("lowtide-zoo.jsonl"),
) -> None:
    """Prove that checkpointing is active and that the gradients are right, by running training steps.

    Judges anybody's set-up: the model as it is, transformers' own flag, or Lowtide's. Exit code 0: nothing failed.
    1: a check failed, or nothing is proven about gradients. 2: it could not be run; of the zoo, at least one
    architecture.

    Is transformers' checkpointing right for Mllama?  [bold]lowtide audit mllama[/]

    Your own model, in CI:  [bold]lowtide audit my_package.models:tiny --format github[/]

    All architectures, against our engine:  [bold]lowtide audit --zoo --engine lowtide[/]
    """
    from lowtide.errors import LowtideError

    if (target is None) != whole_zoo:
        give_up("give one target, or --zoo")
    if whole_zoo:
        refuse_unused(context, _OF_ONE, "is for one target: the zoo has its own")
        check_output(records)
    else:
        refuse_unused(context, _OF_ZOO, "goes with --zoo")
    check_output(to)
    try:
        if whole_zoo:
            code = _audit_zoo(engine or EngineName.TRANSFORMERS, family, records, workers, timeout, resume, output, to)
        else:
            code = _audit_one(str(target), engine, policy, checks, seed, device, output, to)
    except LowtideError as error:
        give_up(str(error))
    raise typer.Exit(code)


def _audit_one(
    name: str,
    engine: EngineName | None,
    policy: str | None,
    checks: str | None,
    seed: int,
    device: str | None,
    output: Format,
    to: Path | None,
) -> int:
    import lowtide
    from lowtide.auditing.report import REFUSAL
    from lowtide.targets.audited import load_target

    if device is not None:
        _check_device(device)
    with Console(stderr=True).status(f"auditing {name}"):
        target = load_target(name, seed=seed)
        if device is not None:
            target = target.to(device)
        options: dict[str, Any] = {"seed": seed, **target.options, **_setup(engine, policy, target)}
        if checks is not None:
            options["checks"] = [check.strip() for check in checks.split(",")]
        report = lowtide.audit(target.model, target.batch, **options)
    for check in report.checks:
        if REFUSAL in check.evidence:
            give_up(check.evidence[REFUSAL])
    _print(report, output, to)
    return 0 if report.ok else 1


def _check_device(device: str) -> None:
    """Before the work: a build without it, a machine without it, or no such word."""
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        give_up(f"--device {device} cannot be used here: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _setup(engine: EngineName | None, policy: str | None, target: Target) -> dict[str, Any]:
    import lowtide
    from lowtide.auditing.setups import MODES
    from lowtide.errors import InvalidValueError
    from lowtide_zoo.survey import dropout_under

    if policy is None and engine is None:
        return {}
    if "configure" in target.options:
        raise InvalidValueError(f"{target.name} says itself what to judge (configure): leave --engine and --policy out")
    if engine is EngineName.TRANSFORMERS:
        if policy is not None:
            raise InvalidValueError("--policy is for Lowtide's engine: leave out --engine transformers")
        return {"modes": MODES}
    wanted = lowtide.Policy.parse(policy or "recompute")
    dropout = {"dropout": dropout_under(wanted)} if target.is_tiny else {}
    return {"configure": lambda model: lowtide.apply(model, wanted), "offload": wanted.offload is not None, **dropout}


def _print(report: AuditReport, output: Format, to: Path | None) -> None:
    if output is Format.TEXT and to is None:
        _print_text(report)
    else:
        write(_formatted(report, output), to)


def _formatted(report: AuditReport, output: Format) -> str:
    if output is Format.JSON:
        return report.to_json()
    if output is Format.HTML:
        return report.to_html()
    if output is Format.JUNIT:
        from lowtide.auditing.ci import as_junit

        return as_junit(report)
    if output is Format.GITHUB:
        from lowtide.auditing.ci import as_github

        return as_github(report)
    return str(report)


def _print_text(report: AuditReport) -> None:
    console = Console(highlight=False)
    mode = None
    for check in report.checks:
        if check.mode != mode:
            mode = check.mode
            console.print(f"[bold]{escape(report.model)}[/], {escape(mode)}")
        colour = _COLOURS[check.verdict]
        console.print(
            f"  [{colour}]{check.verdict:<14}[/] {escape(check.name)}: {escape(check.summary)}", soft_wrap=True
        )
        if check.verdict in ("fail", "inconclusive") and check.remedy:
            console.print(f"                 [dim]remedy: {escape(check.remedy)}[/]", soft_wrap=True)
    console.print(f"[{'green' if report.ok else 'red'}]{escape(report.conclusion)}[/]")


def _audit_zoo(
    engine: EngineName,
    family: str,
    records: Path,
    workers: int,
    timeout: float,
    resume: bool,
    output: Format,
    to: Path | None,
) -> int:
    import lowtide_zoo as zoo
    from lowtide.errors import InvalidValueError
    from lowtide_zoo.records import surveyed
    from lowtide_zoo.survey import Engine, run_survey

    if output not in (Format.TEXT, Format.JSON, Format.HTML):
        raise InvalidValueError(f"the zoo's summary is text, json or html, not {output}")
    wanted = [name for name in zoo.model_types() if fnmatch.fnmatchcase(name, family)]
    if not wanted:
        raise InvalidValueError(f"no model type of the installed transformers fits {family!r}")
    done = surveyed(records, engine.value) if resume else set()
    found = _with_progress(
        len([name for name in wanted if name not in done]),
        lambda show: run_survey(
            wanted, Engine(engine.value), records, workers=workers, timeout=timeout, resume=resume, on_record=show
        ),
    )
    _print_zoo(found, output, to)
    if any(record.failures for record in found):
        return 1
    return COULD_NOT_RUN if any(record.status in _NO_ANSWER for record in found) else 0


def _with_progress(total: int, run: Any) -> list[Record]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)

        def show(record: Record) -> None:
            marks = f"{len(record.failures)} failures" if record.failures else record.status
            progress.update(task, advance=1, description=f"{record.model_type}: {marks}")

        found: list[Record] = run(show)
    return found


def _print_zoo(found: list[Record], output: Format, to: Path | None) -> None:
    from lowtide_zoo.page import as_html, as_json, as_text

    write({Format.TEXT: as_text, Format.JSON: as_json, Format.HTML: as_html}[output](found), to)
