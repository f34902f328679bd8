"""`lowtide audit`: judges one model, or every architecture of the installed transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fnmatch
import itertools
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lowtide.cli.output import (
    COULD_NOT_RUN,
    MODEL_HELP,
    Format,
    check_output,
    format_option,
    give_up,
    note,
    print_paragraph,
    refuse_unused,
    write,
)
from lowtide.progress import progress_bar

if TYPE_CHECKING:
    from lowtide.auditing import AuditReport
    from lowtide.auditing.grades import Grade
    from lowtide_zoo import TinyModel
    from lowtide_zoo.audited_model import AuditedModel
    from lowtide_zoo.records import Pass, Record
    from lowtide_zoo.subjects import Subject

_COLOURS = {"pass": "green", "untidy": "yellow", "inconclusive": "yellow", "not applicable": "dim"}
"""By label; other failures are red."""
_FOR_ONE = ("policy", "checks", "seed", "device", "baseline", "model_class", "variant")
_FOR_ZOO = ("family", "workers", "timeout", "resume", "records", "every_class", "variants")
_NO_ANSWER = ("failed to run", "timed out")
"""Records of the zoo that say nothing about the engine. One that was refused or not built has its reason."""


_logger = logging.getLogger(__name__)


class EngineName(enum.StrEnum):
    TRANSFORMERS = "transformers"
    LOWTIDE = "lowtide"
    TRL = "trl"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    PEFT_KBIT = "peft-kbit"
    UNSLOTH = "unsloth"
    AXOLOTL = "axolotl"


def audit(
    context: typer.Context,
    target: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=False)] = None,
    *,
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="What to judge: transformers' own flag in both of its modes, lowtide.apply, or the set-up of another "
            "library that is installed. Default: the flag, if this is a transformers model with nothing switched on; "
            "else the model as it is."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Judge lowtide.apply with this policy, e.g. recompute+tile.")
    ] = None,
    checks: Annotated[
        str | None, typer.Option(help="Only these checks, comma-separated. An unknown name lists them all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for random weights, batch and dropout.")] = 0,
    device: Annotated[str | None, typer.Option(help="Move the model and the batch there first, e.g. cuda.")] = None,
    model_class: Annotated[
        str | None, typer.Option("--class", help="With a model type: this class of it, e.g. BlipModel.")
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(help="With a model type: turn a feature on, e.g. kv-sharing. An unknown name lists them all."),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="<untidy|unsafe|no-effect|wrong>",
            help="The mildest grade of a failure that makes the exit code 1: untidy (hooks are left), unsafe (under "
            "DDP), no-effect (no memory saved) or wrong (gradients). Default: unsafe.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="An earlier report, made with --format json: the failures in it are known and do not count."),
    ] = None,
    output: Annotated[Format, format_option("the report", *Format)] = Format.TEXT,
    to: Annotated[Path | None, typer.Option("--output", "-o", help="Write the report to this file instead.")] = None,
    whole_zoo: Annotated[
        bool, typer.Option("--zoo", help="Audit every architecture of the installed transformers, tiny and random.")
    ] = False,
    family: Annotated[str, typer.Option(help="With --zoo: only model types that match this glob.")] = "*",
    every_class: Annotated[
        bool, typer.Option("--every-class", help="With --zoo: all public classes that differ in more than their heads.")
    ] = False,
    variants: Annotated[
        bool, typer.Option("--variants", help="With --zoo: also with features on that are off by default.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="With --zoo: how many processes run at a time.")] = 2,
    timeout: Annotated[float, typer.Option(help="With --zoo: seconds per architecture.")] = 240,
    resume: Annotated[bool, typer.Option(help="With --zoo: continue where the records end.")] = False,
    records: Annotated[
        Path,
        typer.Option(help="With --zoo: where each architecture is recorded as soon as it is done, as a line of JSON."),
    ] = Path("lowtide-zoo.jsonl"),
) -> None:
    """Prove that checkpointing is active and that the gradients are right, by running training steps.

    It judges any set-up: the model as it is, transformers' own flag, or Lowtide.

    A model type stands for a tiny model with random weights. Any other name is
    audited at full size, with its weights if they are on this machine, else with
    random ones; if that does not fit in memory, a tiny model of the same type is
    audited instead, and a note says so.

    Exit code 0: nothing failed that counts (--fail-on, --baseline). 1: a check
    failed, or nothing is proven about gradients. 2: it could not run; with
    --zoo, for at least one architecture.

    Is transformers' checkpointing right for Mllama?  [bold]lowtide audit mllama[/]

    A model on disk, with its weights:  [bold]lowtide audit ./my-model[/]

    Your own model, in CI:  [bold]lowtide audit my_package.models:tiny --format github[/]

    A report for transformers, with a script that shows the worst fault:
    [bold]lowtide audit mllama --format issue[/]

    All architectures, against our engine:  [bold]lowtide audit --zoo --engine lowtide[/]
    """
    from lowtide.auditing.grades import grade_named
    from lowtide.errors import LowtideError

    if (target is None) != whole_zoo:
        give_up("give one target, or --zoo")
    if whole_zoo:
        refuse_unused(context, _FOR_ONE, "is for one target: the zoo has its own setting")
        check_output(records)
    else:
        refuse_unused(context, _FOR_ZOO, "goes with --zoo")
    check_output(to)
    try:
        if whole_zoo:
            started = time.monotonic()
            chosen = engine or EngineName.TRANSFORMERS
            threshold = grade_named(fail_on or "unsafe")
            found = _subjects(family, workers, every_class=every_class, variants=variants)
            code = _audit_zoo(chosen, found, records, workers, timeout, resume, threshold, output, to, started)
        else:
            judged = {"fail_on": fail_on, "baseline": baseline}
            given = {name: value for name, value in judged.items() if value is not None}
            unusual = {"model_class": model_class, "variant": variant}
            code = _audit_one(str(target), unusual, engine, policy, checks, seed, device, given, output, to)
    except LowtideError as error:
        _logger.debug("the audit could not run", exc_info=error)
        give_up(str(error))
    raise typer.Exit(code)


def _audit_one(
    name: str,
    unusual: dict[str, str | None],
    engine: EngineName | None,
    policy: str | None,
    checks: str | None,
    seed: int,
    device: str | None,
    judged: dict[str, Any],
    output: Format,
    to: Path | None,
) -> int:
    from lowtide.auditing.result import REFUSAL
    from lowtide.targets.models import current_folder_importable
    from lowtide.targets.target import is_factory
    from lowtide_zoo.audited_model import load_audited

    if device is not None:
        _check_device(device)
    console = Console(stderr=True)
    # A factory's model may import from the current folder late. For other targets a file there must not hide a package.
    with current_folder_importable() if is_factory(name) else contextlib.nullcontext():
        with console.status(f"building {escape(name)}"):
            audited = load_audited(name, seed=seed, **unusual)
        if audited.note is not None:  # before the audit, so that it is said even if the audit fails
            note(audited.note)
        if output is Format.ISSUE and audited.tiny_model is None:
            give_up("--format issue writes a script from a model type of transformers: name one, such as llama")
        if device is not None:
            audited = audited.to(device)
        options: dict[str, Any] = {"seed": seed, **audited.options, **_setup(engine, policy, audited), **judged}
        if checks is not None:
            options["checks"] = [check.strip() for check in checks.split(",")]
        with console.status(f"auditing {escape(name)}"):
            report = _run(engine, audited, options)
    for check in report.checks:
        if REFUSAL in check.evidence:
            give_up(check.evidence[REFUSAL])
    if audited.note is not None:
        report = dataclasses.replace(report, model=f"{report.model} (tiny, in place of {audited.name})")
    if output is Format.ISSUE and audited.tiny_model is not None:
        write(_issue(audited.tiny_model, report), to)
    else:
        _print(report, output, to)
    return 0 if report.ok else 1


def _run(engine: EngineName | None, audited: AuditedModel, options: dict[str, Any]) -> AuditReport:
    import lowtide
    from lowtide_zoo.peers import PEERS, audit_peer

    if engine is not None and engine.value in PEERS:
        return audit_peer(engine.value, audited.model, audited.batch, **options)
    return lowtide.audit(audited.model, audited.batch, **options)


def _issue(tiny_model: TinyModel, report: AuditReport) -> str:
    """Write up the worst failure, after its script has shown it."""
    from lowtide_zoo.issue import shows, write_issue

    issue = write_issue(tiny_model, report)
    with Console(stderr=True).status("running the script"):
        output = shows(issue)
    if output is None:
        give_up(f"the script does not show this failure, so it is not written up: {issue.title}")
    return issue.as_text(output)


def _check_device(device: str) -> None:
    """Give up if torch cannot use the device: an unknown word, a build without it, or a machine without it."""
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        give_up(f"--device {device} cannot be used here: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _setup(engine: EngineName | None, policy: str | None, audited: AuditedModel) -> dict[str, Any]:
    import lowtide
    from lowtide.auditing.setups import MODES
    from lowtide.errors import InvalidValueError
    from lowtide_zoo.survey import dropout_under

    if policy is None and engine is None:
        return {}
    if "configure" in audited.options:
        raise InvalidValueError(
            f"{audited.name} returns configure, which decides what is judged: leave --engine and --policy out"
        )
    if engine not in (None, EngineName.LOWTIDE):
        if policy is not None:
            raise InvalidValueError(f"--policy is for Lowtide's engine: leave out --engine {engine}")
        return {"modes": MODES} if engine is EngineName.TRANSFORMERS else {}
    wanted = lowtide.Policy.parse(policy or "recompute")
    dropout = {"dropout": dropout_under(wanted)} if audited.is_tiny else {}
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
    """Print the text report in colours."""
    from lowtide.auditing.report import text_lines

    console = Console(highlight=False)
    for label, text, check in text_lines(report):
        if check is None:
            print_paragraph(console, f"[bold]{escape(text)}[/]")
        else:
            colour = _COLOURS.get(check.label, "red") if label else "dim"
            print_paragraph(console, f"  [{colour}]{label:<9}[/] {escape(text)}")


def _subjects(family: str, workers: int, *, every_class: bool, variants: bool) -> list[Subject]:
    """List what the zoo's survey audits."""
    import lowtide_zoo as zoo
    from lowtide.errors import InvalidValueError
    from lowtide_zoo.subjects import Subject
    from lowtide_zoo.survey import find_subjects

    wanted = [name for name in zoo.model_types() if fnmatch.fnmatchcase(name, family)]
    if not wanted:
        raise InvalidValueError(f"no model type of the installed transformers fits {family!r}")
    if not every_class and not variants:
        return [Subject(name) for name in wanted]
    with progress_bar(Console(stderr=True), "looking for classes", total=len(wanted)) as show:
        count = itertools.count(1)
        return find_subjects(
            wanted,
            every_class=every_class,
            variants=variants,
            workers=workers,
            on_type=lambda name: show(name, next(count), len(wanted)),
        )


def _audit_zoo(
    engine: EngineName,
    wanted: list[Subject],
    records: Path,
    workers: int,
    timeout: float,
    resume: bool,
    fail_on: Grade,
    output: Format,
    to: Path | None,
    started: float,
) -> int:
    from lowtide.errors import InvalidValueError
    from lowtide_zoo.records import Pass, surveyed
    from lowtide_zoo.survey import Engine, run_survey

    if output not in (Format.TEXT, Format.JSON, Format.HTML):
        raise InvalidValueError(f"--zoo prints text, json or html, not {output}")
    done = surveyed(records, engine.value) if resume else set()
    left = len([name for name in wanted if name not in done])
    with progress_bar(Console(stderr=True), total=left, shows_remaining=True) as show:
        count = itertools.count(1)

        def on_record(record: Record) -> None:
            outcome = f"{len(record.failures)} failures" if record.failures else record.status
            show(f"{record.subject.name}: {outcome}", next(count), left)

        found = run_survey(
            wanted, Engine(engine.value), records, workers=workers, timeout=timeout, resume=resume, on_record=on_record
        )
    last_pass = Pass(seconds=round(time.monotonic() - started, 1), workers=workers, subjects=left)
    _print_zoo(found, last_pass, output, to)
    if any(grade.reaches(fail_on) for record in found for grade in record.grades):
        return 1
    return COULD_NOT_RUN if any(record.status in _NO_ANSWER for record in found) else 0


def _print_zoo(found: list[Record], last_pass: Pass, output: Format, to: Path | None) -> None:
    from lowtide_zoo.page import as_html, as_json, as_text

    formats = {
        Format.TEXT: lambda: f"{as_text(found)}\n{last_pass}",
        Format.JSON: lambda: as_json(found, last_pass),
        Format.HTML: lambda: as_html(found),
    }
    write(formats[output](), to)
