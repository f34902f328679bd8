"""`lowtide plan` and `lowtide calibrate`: will it fit, which policy is the fastest that fits, how long can it be."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from lowtide.cli.output import (
    MODEL_HELP,
    Format,
    check_output,
    format_option,
    give_up,
    print_paragraph,
    refuse_unused,
    write,
)
from lowtide.progress import progress_bar

if TYPE_CHECKING:
    from lowtide.planning import Plan
    from lowtide.planning.max_fit import MaxFit
    from lowtide.simulation.estimate import Estimate


_POLICY = len("recompute+offload+tile(loss)")
"""The least width of the column of policies. Longer ones are broken before a plus sign."""
_REASON = "at the peak"
_SENTENCE = 40
"""From this many columns on, a sentence is wrapped; in fewer, it is cut."""
_GAP = 2
"""Spaces between two columns of a table."""


class EngineName(enum.StrEnum):
    DDP = "ddp"
    FSDP2 = "fsdp2"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help=MODEL_HELP,
        ),
    ],
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens per sequence: 131072 or 128k. Default: 8k; with MODULE:FACTORY, as long as its batch."
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Plan a data set: a file with the tokens of one sequence in each line. What fits is the longest; the "
            "mean step is told, too."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The GPU: H100, L40S, RTX 4090, ... Default: the one in this machine.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Device memory to use, e.g. 44GiB. Default: all of it.")] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Host memory that offload may pin per rank. Default: twice the device's memory.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes, one per device. Default: those that share a batch by --tp, --sp, --cp and --pp.",
        ),
    ] = None,
    engine: Annotated[
        EngineName | None, typer.Option(help="How the ranks share the work. Default for several ranks: ddp.")
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Divide each layer's weights among N ranks, by the model's own plan.")
    ] = 1,
    sp: Annotated[
        int, typer.Option(min=1, help="Divide sequences among N ranks, and attention by heads (DeepSpeed Ulysses).")
    ] = 1,
    cp: Annotated[
        int, typer.Option(min=1, help="Divide sequences among N ranks, which gather keys and values. Not modelled yet.")
    ] = 1,
    pp: Annotated[
        int, typer.Option(min=1, help="Divide the layers among N ranks, in a pipeline. Not modelled yet.")
    ] = 1,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Batches that a pipeline takes per step. Not modelled yet.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences per rank, or per group of ranks that share a batch.")
    ] = 1,
    images: Annotated[str | None, typer.Option(help="Pictures per sequence, and their size: 4x1024x1024.")] = None,
    lora: Annotated[int | None, typer.Option(help="Rank of LoRA adapters. Default: full fine-tuning.")] = None,
    lora_dtype: Annotated[
        str, typer.Option(help="Type of the adapters: fp32, which is PEFT's default, or bf16.")
    ] = "fp32",
    four_bit: Annotated[bool, typer.Option("--4bit", help="The frozen base has 4-bit weights (QLoRA).")] = False,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights: bf16, fp16 or fp32. Default: bf16.")] = None,
    masters: Annotated[bool, typer.Option(help="The optimizer keeps float32 copies of the weights.")] = False,
    optimizer: Annotated[str, typer.Option(help="adamw (fused), adamw_foreach, adamw8bit or sgd.")] = "adamw",
    optimizer_in_backward: Annotated[
        bool,
        typer.Option(
            "--optimizer-in-backward",
            help="Update each weight in backward and free its gradient. Leaves no room for clipping or accumulation.",
        ),
    ] = False,
    attention: Annotated[str, typer.Option(help="auto, flash, efficient, cudnn or math.")] = "auto",
    policy: Annotated[str | None, typer.Option(help="Simulate only this policy, with every layer.")] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="Find the longest sequence that fits, for each policy.")
    ] = False,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find the largest batch that fits, for each policy.")
    ] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Simulate every layer of every policy.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="The file that `lowtide calibrate` wrote on the GPU.")
    ] = None,
    cache: Annotated[bool, typer.Option(help="Keep results, and reuse those of earlier plans.")] = True,
    output: Annotated[Format, format_option("the plan", Format.TEXT, Format.JSON, Format.HTML)] = Format.TEXT,
    to: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file instead.")] = None,
) -> None:
    """Will it fit, and which policy is the fastest that fits? No GPU is needed.

    One training step of the real model runs through the real engine, on tensors
    that have shapes but take no memory. Of a model on the Hub, only the
    configuration is downloaded.

    Exit code 0: something fits. 1: nothing fits. 2: the plan could not be made.

    [bold]lowtide plan Qwen3-VL-4B --tokens 128k --device L40S --ranks 8 --lora 16 --lora-dtype bf16[/]

    [bold]lowtide plan Llama-3.1-8B --device H100 --longest[/]
    """
    from lowtide.errors import LowtideError
    from lowtide.targets.target import is_factory

    _check_question(context, output, longest=longest, largest_batch=largest_batch, exact=exact)
    if lengths is not None:
        refuse_unused(context, ("tokens", "longest", "largest_batch"), "and --lengths are two questions: ask one")
        if is_factory(model):
            give_up("--lengths makes batches itself: it is for models that are planned by name")
    if lora is None:
        refuse_unused(context, ("lora_dtype",), "is for adapters: give --lora 16 (or another rank)")
    check_output(to)
    settings: dict[str, Any] = {
        "batch_size": batch,
        "images": images,
        "ranks": ranks,
        "engine": engine.value if engine else None,
        "tp": tp,
        "sp": sp,
        "cp": cp,
        "pp": pp,
        "microbatches": microbatches,
        "lora": lora,
        "lora_dtype": lora_dtype,
        "base": "4bit" if four_bit else "plain",
        "dtype": dtype,
        "masters": masters,
        "optimizer": optimizer,
        "optimizer_in_backward": optimizer_in_backward,
        "attention": attention,
    }
    limits: dict[str, Any] = {
        "device": device,
        "budget": budget,
        "host_budget": host_budget,
        "calibration": calibration,
    }
    tokens = "8k" if tokens is None and not is_factory(model) else tokens
    try:
        if lengths is not None:
            from lowtide.planning.lengths import longest_of, read_lengths

            found = read_lengths(lengths)
            tokens = str(longest_of(found, sp * cp))
        if longest or largest_batch:
            figure = "tokens" if longest else "batch_size"
            code = _find_largest(
                model, tokens, settings, limits, policy, figure=figure, cache=cache, output=output, to=to
            )
        else:
            asked: dict[str, Any] = {"lengths": found if lengths else None, "exact": exact, "cache": cache}
            code = _plan(model, tokens, settings | limits, policy, **asked, output=output, to=to)
    except LowtideError as error:
        give_up(str(error))
    raise typer.Exit(code)


def _check_question(context: typer.Context, output: Format, *, longest: bool, largest_batch: bool, exact: bool) -> None:
    """Give up if both questions about size are asked at once, or if the size that is to be found is given."""
    if longest and largest_batch:
        give_up("--longest and --largest-batch are two questions: ask one at a time")
    if (longest or largest_batch) and output is Format.HTML:
        give_up("--longest and --largest-batch are answered as text or json")
    if (longest or largest_batch) and exact:
        give_up("--exact is for a plan: --longest and --largest-batch try many sizes, without it")
    if longest:
        refuse_unused(context, ("tokens",), "is what --longest finds: leave one of them out")
    if largest_batch:
        refuse_unused(context, ("batch",), "is what --largest-batch finds: leave one of them out")


def calibrate(
    to: Annotated[Path, typer.Option("--output", "-o", help="Where to write the measurements.")] = Path(
        "lowtide-calibration.json"
    ),
) -> None:
    """Measure how close this machine's GPU comes to its data sheet, so that plans tell better times. Takes a minute."""
    from lowtide.errors import LowtideError
    from lowtide.hardware.calibration import calibrate as run_calibration

    check_output(to)
    try:
        found = run_calibration(to)
    except LowtideError as error:
        give_up(str(error))
    path = escape(str(to))
    Console().print(f"{escape(str(found))}\nwritten to {path}: give it to [bold]lowtide plan --calibration {path}[/]")


def _plan(
    model: str,
    tokens: str | None,
    settings: dict[str, Any],
    policy: str | None,
    *,
    lengths: list[int] | None,
    exact: bool,
    cache: bool,
    output: Format,
    to: Path | None,
) -> int:
    from lowtide.planning import plan as make_plan

    with progress_bar(Console(stderr=True), "building the model") as show:
        found = make_plan(model, tokens=tokens, policy=policy, exact=exact, cache=cache, progress=show, **settings)
        if lengths is not None:
            from lowtide.planning.lengths import step_of

            step = step_of(found, model, lengths, cache=cache)
            found = dataclasses.replace(found, notes=[str(step), *found.notes], mean_step=step.to_dict())
    if output is Format.TEXT and to is None:
        _print_plan(found)
    else:
        write(_formatted(found, output), to)
    return 0 if found.fits else 1


def _formatted(plan: Plan, output: Format) -> str:
    if output is Format.JSON:
        return plan.to_json()
    return plan.to_html() if output is Format.HTML else str(plan)


def _print_plan(plan: Plan) -> None:
    from lowtide.planning.page import code_for

    console = Console(highlight=False)
    console.print(_headline(plan))
    console.print(_table_of(plan, console))
    if (line := code_for(plan)) is not None:
        console.print(f"\n[bold green]{escape(line)}[/]", soft_wrap=True)
        if plan.why_not_faster:
            print_paragraph(console, f"[dim]why nothing faster: {escape(plan.why_not_faster)}[/]")
    else:
        least = plan.least
        console.print(f"\n[bold red]nothing fits[/]: the least is {escape(least.policy)}, which {escape(least.limit)}")
    for note in plan.notes:
        print_paragraph(console, f"[dim]note: {escape(note)}[/]")


def _table_of(plan: Plan, console: Console) -> Table:
    """Make the table of candidates. Policies and figures are never cut; the reason gets the room that they leave."""
    bare = _table_with(plan, console, 0)
    room = console.width - Measurement.get(console, console.options, bare).maximum - _GAP
    return _table_with(plan, console, room) if room >= len(_REASON) else bare


def _table_with(plan: Plan, console: Console, room: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    _add_columns(table, console)
    if room:
        table.add_column(_REASON, no_wrap=room < _SENTENCE, max_width=room)
    for candidate in plan.candidates:
        is_best = plan.best is not None and candidate.policy == plan.best.policy
        text = _policy_text(candidate.policy, console)
        table.add_row(
            "[green]fits[/]" if candidate.fits else "[red]no[/]",
            f"[bold]{text}[/]" if is_best else text,
            *_figures(candidate.device_bytes, candidate.estimate),
            *([escape(candidate.limit)] if room else []),
        )
    return table


def _add_columns(table: Table, console: Console, *before: str) -> None:
    """Add the columns that both tables have. A policy longer than a third of the line is wrapped, never cut."""
    table.add_column("policy", overflow="fold", max_width=_policy_width(console))
    for heading in (*before, "device", "host", "step"):
        table.add_column(heading, justify="right", no_wrap=True)


def _policy_width(console: Console) -> int:
    return max(_POLICY, console.width // 3)


def _policy_text(policy: str, console: Console) -> str:
    """Break a policy into lines that the column has room for: between its rules, and before a plus sign."""
    lines = [""]
    for part in re.findall(r"\+?[^+ ]+ ?", policy):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > _policy_width(console):
            lines.append("")
        lines[-1] += part
    return escape("\n".join(line.rstrip() for line in lines))


def _figures(device_bytes: int, estimate: Estimate) -> tuple[str, str, str]:
    """Format a policy's figures for both tables: device memory with its margins, host memory, seconds of a step."""
    from lowtide.units import format_bytes

    host = format_bytes(estimate.host_bytes) if estimate.host_bytes else ""
    return format_bytes(device_bytes), host, f"{estimate.seconds:.3g} s"


def _headline(plan: Plan) -> str:
    from lowtide.units import format_bytes

    job, summary = plan.job, plan.summary
    trained = f"LoRA {job.lora}" if job.lora else "full fine-tuning"
    return (
        f"[bold]{escape(summary.name)}[/] ({summary.parameters / 1e9:.3g} billion weights), {trained}, "
        f"{job.size}, {plan.where}, {format_bytes(plan.budget)}"
    )


def _find_largest(
    model: str,
    tokens: str | None,
    settings: dict[str, Any],
    limits: dict[str, Any],
    policy: str | None,
    *,
    figure: str,
    cache: bool,
    output: Format,
    to: Path | None,
) -> int:
    from lowtide.hardware.accelerators import resolve_accelerator
    from lowtide.planning.max_fit import find_max
    from lowtide.targets.job import make_job

    with progress_bar(Console(stderr=True), "building the model") as show:
        found = find_max(
            model,
            make_job(tokens=tokens, **settings),
            resolve_accelerator(limits["device"], limits["calibration"]),
            dimension=figure,
            budget=limits["budget"],
            host_budget=limits["host_budget"],
            policies=None if policy is None else [policy],
            cache=cache,
            progress=show,
        )
    if output is Format.TEXT and to is None:
        _print_largest(found, figure)
    elif output is Format.TEXT:
        write("\n".join(f"{row.policy}: {row.most}" for row in found), to)
    else:
        write(json.dumps([row.to_dict() for row in found], indent=2), to)
    return 0 if any(row.most for row in found) else 1


def _print_largest(found: list[MaxFit], figure: str) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    _add_columns(table, console, "longest sequence" if figure == "tokens" else "largest batch")
    for row in found:
        if row.estimate is None or row.device_bytes is None:
            table.add_row(_policy_text(row.policy, console), "none fits")
            continue
        table.add_row(_policy_text(row.policy, console), f"{row.most:,}", *_figures(row.device_bytes, row.estimate))
    console.print(table)
