"""`lowtide plan` and `lowtide calibrate`: will it fit, which policies are the best that fit, how long can it be."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lowtide.cli import plan_options as options  # noqa: TC001  (Typer reads the annotations)
from lowtide.cli.output import Format, check_output, format_option, give_up, is_given, refuse_unused, write
from lowtide.cli.plan_table import headline, largest_table_of, print_largest, print_plan, table_of
from lowtide.progress import progress_bar

if TYPE_CHECKING:
    from lowtide.hardware.accelerators import Accelerator
    from lowtide.planning import Candidate, Plan
    from lowtide.planning.max_fit import MaxFit
    from lowtide.planning.result import WayOut

_LIMITS = ("device", "budget", "host_budget", "calibration")
_JOB = (
    *("batch_size", "images", "lora", "lora_dtype", "dtype", "masters", "optimizer", "optimizer_in_backward"),
    *("attention", "ranks", "tp", "sp", "cp", "pp", "microbatches", "lora_dropout", "keep_output", "keep_gradients"),
    *("expandable_segments", "reduce_dtype", "reshard", "units", "double_quant", "kbit"),
)
"""The options that `lowtide.plan` takes under the same names."""


def plan(
    context: typer.Context,
    model: options.Model = None,
    tokens: options.Tokens = None,
    lengths: options.Lengths = None,
    batch_size: options.BatchSize = 1,  # noqa: ARG001  (this and other settings of the job are read from the context)
    images: options.Images = None,  # noqa: ARG001
    lora: options.Lora = None,  # noqa: ARG001
    lora_dtype: options.LoraDtype = "fp32",  # noqa: ARG001
    lora_targets: options.LoraTargets = None,
    lora_dropout: options.LoraDropout = 0.0,  # noqa: ARG001
    four_bit: options.FourBit = False,
    double_quant: options.DoubleQuant = False,  # noqa: ARG001
    kbit: options.Kbit = False,  # noqa: ARG001
    dtype: options.Dtype = None,  # noqa: ARG001
    masters: options.Masters = False,  # noqa: ARG001
    optimizer: options.Optimizer = "adamw",  # noqa: ARG001
    optimizer_in_backward: options.OptimizerInBackward = False,  # noqa: ARG001
    attention: options.Attention = "auto",  # noqa: ARG001
    trainer: options.Trainer = None,
    keep_gradients: options.KeepGradients = False,  # noqa: ARG001
    keep_output: options.KeepOutput = False,  # noqa: ARG001
    device: options.Device = None,  # noqa: ARG001
    device_file: options.DeviceFile = None,
    expandable_segments: options.ExpandableSegments = False,  # noqa: ARG001
    budget: options.Budget = None,  # noqa: ARG001
    headroom: options.Headroom = None,
    host_budget: options.HostBudget = None,  # noqa: ARG001
    calibration: options.Calibration = None,  # noqa: ARG001
    ranks: options.Ranks = None,  # noqa: ARG001
    engine: options.Engine = None,
    tp: options.Tp = 1,  # noqa: ARG001
    sp: options.Sp = 1,
    cp: options.Cp = 1,
    pp: options.Pp = 1,  # noqa: ARG001
    microbatches: options.Microbatches = None,  # noqa: ARG001
    reduce_dtype: options.ReduceDtype = None,  # noqa: ARG001
    reshard: options.Reshard = True,  # noqa: ARG001
    units: options.Units = "blocks",  # noqa: ARG001
    reduce_bucket: options.ReduceBucket = None,
    policy: options.ThePolicy = None,
    longest: options.Longest = False,
    largest_batch: options.LargestBatch = False,
    exact: options.Exact = False,
    cache: options.Cache = True,
    output: Annotated[
        Format, format_option("the plan", Format.TEXT, Format.JSON, Format.HTML, Format.REPORT)
    ] = Format.TEXT,
    to: options.Output = None,
    serve: options.Serve = False,
    port: options.Port = 0,
) -> None:
    """Will it fit, and which policies are the best that fit? No GPU is needed.

    One training step of the real model runs through the real engine, on tensors that have shapes but take no memory.
    Of a model on the Hub, only the configuration is downloaded.

    [bold]none[/]: keep everything. [bold]recompute[/]: keep each layer's input, and run the layer again in backward.
    [bold]recompute(keep=attention)[/]: the same, without running attention again.
    [bold]offload[/]: what is kept waits in host memory.
    [bold]tile[/]: attention, MLPs and the loss run on a few thousand tokens at a time.
    [bold]layers.0-9: ...[/]: a rule for some layers. More: [bold]lowtide policies[/].

    Exit code 0: something fits. 1: nothing fits. 2: the plan could not be made.

    [bold]lowtide plan Qwen3-VL-4B --tokens 128k --device L40S --ranks 8 --lora 16 --lora-dtype bf16[/]

    [bold]lowtide plan Llama-3.1-8B --device H100 --longest[/]
    """
    from lowtide.errors import LowtideError
    from lowtide.planning.planner import HEADROOM
    from lowtide.targets.target import is_factory
    from lowtide.units import parse_share

    if serve:
        _serve(context, port)
        return
    if model is None:
        give_up("name a MODEL, or open the page to plan in with --serve")
    refuse_unused(context, ("port",), "is for the page: give --serve too")
    _check_question(context, output, longest=longest, largest_batch=largest_batch, exact=exact)
    if lengths is not None and is_factory(model):
        give_up("--lengths makes batches itself: it is for models that are planned by name")
    check_output(to)
    settings = {name: context.params[name] for name in _JOB}
    settings |= {
        "tokens": "8k" if tokens is None and not is_factory(model) else tokens,
        "engine": engine.value if engine else None,
        "trainer": trainer.value if trainer else None,
        "base": "4bit" if four_bit else "plain",
    }
    if lora_targets is not None:
        settings["lora_targets"] = tuple(filter(None, map(str.strip, lora_targets.split(","))))
    if reduce_bucket is not None:
        settings["reduce_bucket"] = reduce_bucket
    limits = {name: context.params[name] for name in _LIMITS}
    if device_file is not None:
        limits["device"] = _read_device(context, device_file)
    try:
        if longest or largest_batch:
            dimension = "tokens" if longest else "batch_size"
            share = HEADROOM if headroom is None else parse_share(headroom)
            found = _find_largest(model, settings, limits, policy, share, dimension, cache=cache)
            code = _show_largest(found, dimension, output, to, share)
        else:
            room = {} if headroom is None else {"headroom": headroom}
            asked = {**settings, **limits, **room, "policy": policy, "exact": exact, "cache": cache}
            made = _make_plan(model, asked) if lengths is None else _plan_lengths(model, asked, lengths, sp * cp)
            code = _show_plan(made, context, output, to)
    except LowtideError as error:
        give_up(str(error))
    raise typer.Exit(code)


def _read_device(context: typer.Context, path: Path) -> Accelerator:
    from lowtide.errors import LowtideError
    from lowtide.hardware.accelerators import read_accelerator

    refuse_unused(context, ("device",), "names the GPU, and so does --device-file: leave one of them out")
    try:
        return read_accelerator(path)
    except LowtideError as error:
        give_up(str(error))


_ON_PAGE = ("model", "tokens", "device", "ranks", "engine", "lora", "optimizer", "trainer", "batch_size")
"""The options with which the page begins."""


def _serve(context: typer.Context, port: int) -> None:
    """Serve the page to plan in until Ctrl-C, and open it in a browser if there is one."""
    import webbrowser

    from lowtide.errors import LowtideError
    from lowtide.planning.server import PlannerServer, serving
    from lowtide.units import parse_tokens

    given = [parameter.name or "" for parameter in context.command.params if is_given(context, parameter.name or "")]
    refuse_unused(
        context,
        tuple(name for name in given if name not in (*_ON_PAGE, "four_bit", "serve", "port")),
        "is not on the page of --serve: leave one of them out",
    )
    chosen = {name: context.params[name] for name in given if name in _ON_PAGE}
    try:
        if "tokens" in chosen:
            chosen["tokens"] = parse_tokens(chosen["tokens"])
        server = PlannerServer(port, **chosen, base="4bit" if context.params["four_bit"] else None)
    except (LowtideError, OSError) as error:
        give_up(str(error))
    with serving(server) as address:
        Console().print(f"planning at [bold]{address}[/] (Ctrl-C ends it)", soft_wrap=True)
        webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


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
        refuse_unused(context, ("batch_size",), "is what --largest-batch finds: leave one of them out")
    if is_given(context, "lengths"):
        refuse_unused(context, ("tokens", "longest", "largest_batch"), "and --lengths are two questions: ask one")
    if not is_given(context, "lora"):
        adapters = ("lora_dtype", "lora_targets", "lora_dropout")
        refuse_unused(context, adapters, "is for adapters: give --lora 16 (or another rank)")
    if not is_given(context, "four_bit"):
        refuse_unused(context, ("double_quant", "kbit"), "is about a 4-bit base: give --4bit too")


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


def _make_plan(model: str, asked: dict[str, Any]) -> Plan:
    """Make the plan; meanwhile, a terminal shows each policy as soon as its figures are known."""
    from lowtide.planning import plan as make_plan

    known: list[Candidate] = []
    console = Console(stderr=True, highlight=False)

    def rows() -> Any:
        return table_of(sorted(known, key=lambda candidate: candidate.estimate.seconds), console) if known else ""

    with progress_bar(console, "building the model", above=rows) as show:
        return make_plan(model, suggest=True, progress=show, on_candidate=known.append, **asked)


def _plan_lengths(model: str, asked: dict[str, Any], path: Path, parts: int) -> Plan:
    """Plan the longest sequence of a data set, and find what its steps take on average."""
    from lowtide.planning.lengths import longest_of, read_lengths, step_of

    lengths = read_lengths(path)
    found = _make_plan(model, {**asked, "tokens": str(longest_of(lengths, parts))})
    if found.shown is None:
        return found
    step = step_of(found, found.shown.policy, model, lengths, cache=asked["cache"])
    return dataclasses.replace(found, notes=[str(step), *found.notes], mean_step=step.to_dict())


def _show_plan(found: Plan, context: typer.Context, output: Format, to: Path | None) -> int:
    if output is Format.TEXT and to is None:
        console = Console(highlight=False)
        console.print(headline(found))
        print_plan(found, console, [(_command_for(context, way), way) for way in found.ways_out])
    else:
        write(_formatted(found, output), to)
    return 0 if found.fits else 1


def _formatted(plan: Plan, output: Format) -> str:
    from lowtide.planning.report import report_of

    if output is Format.REPORT:
        return report_of(plan)
    return {Format.JSON: plan.to_json, Format.HTML: plan.to_html}.get(output, plan.__str__)()


_OPTIONS = {"base": "--4bit"}
"""How a setting of a job is written on the command line, where it is not by its own name."""


_REPLACES = {"device": ("device_file", "calibration", "budget"), "tokens": ("lengths",)}
"""The options that a change leaves no room for: another card has its own memory, data sheet and measurements."""


def _command_for(context: typer.Context, way: WayOut) -> str:
    """Return the command that was given, with a change that makes the step fit."""
    words = ["lowtide", "plan", str(context.params["model"])]
    dropped = {*way.change, *(name for changed in way.change for name in _REPLACES.get(changed, ()))}
    for parameter in context.command.params:
        name = parameter.name or ""
        if is_given(context, name) and name not in (*dropped, "model", "output", "to"):
            is_off = context.params[name] is False and parameter.secondary_opts
            words += parameter.secondary_opts if is_off else _written(parameter.opts[0], context.params[name])
    for name, value in way.change.items():
        words += _written(_OPTIONS.get(name, f"--{name.replace('_', '-')}"), name == "base" or value)
    return shlex.join(words)


def _written(option: str, value: Any) -> list[str]:
    return [option] if value is True else [] if value in (False, None) else [option, str(value)]


def _find_largest(
    model: str,
    settings: dict[str, Any],
    limits: dict[str, Any],
    policy: str | None,
    headroom: float,
    dimension: str,
    *,
    cache: bool,
) -> list[MaxFit]:
    from lowtide.hardware.accelerators import resolve_accelerator
    from lowtide.planning.max_fit import find_max
    from lowtide.targets.job import make_job

    known: list[MaxFit] = []
    console = Console(stderr=True, highlight=False)

    def rows() -> Any:
        return largest_table_of(known, dimension, console) if known else ""

    with progress_bar(console, "building the model", above=rows) as show:
        return find_max(
            model,
            make_job(**settings),
            resolve_accelerator(limits["device"], limits["calibration"]),
            dimension=dimension,
            budget=limits["budget"],
            host_budget=limits["host_budget"],
            headroom=headroom,
            policies=None if policy is None else [policy],
            cache=cache,
            progress=show,
            on_row=known.append,
        )


def _show_largest(found: list[MaxFit], dimension: str, output: Format, to: Path | None, headroom: float) -> int:
    if output is Format.TEXT and to is None:
        print_largest(found, dimension, Console(highlight=False), headroom)
    elif output is Format.TEXT:
        write("\n".join(f"{row.policy}: {row.most}" for row in found), to)
    else:
        write(json.dumps([row.to_dict() for row in found], indent=2), to)
    return 0 if any(row.most for row in found) else 1
