"""Tells the demo's four acts. All but the plan, which is kept, is measured now; an act that goes wrong ends it all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

import lowtide
from lowtide import simdevice
from lowtide.demo.training import LAYERS, POLICY, Outcome, build, make_batch, ours, plain, their_flag, train
from lowtide.errors import DemoError
from lowtide.progress import progress_bar
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

PLAIN, THEIRS, OURS = "nothing", "transformers' flag", "lowtide"
WAYS = {PLAIN: plain, THEIRS: their_flag, OURS: ours}
STEPS = 6
PATIENCE = 300.0
"""How many seconds the two ranks may take; they need about half a minute."""
FULL_SIZE = {
    "model": "Qwen3-VL-4B",
    "tokens": "128k",
    "device": "L40S",
    "ranks": 8,
    "lora": 16,
    "lora_dtype": "bf16",
}
NEXT = f"""\
$ lowtide plan YOUR_MODEL --tokens 32k --device H100 --lora 16
>>> applied = lowtide.apply(model, "{POLICY}")  # before DDP
$ lowtide audit your_package.models:factory"""


def tell(console: Console) -> None:
    """Tell all four acts, in under three minutes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fits(console)
    is_right(console)
    on_two_ranks(console)
    at_full_size(console)
    console.rule("[bold]Next, for your own run", align="left")
    console.print(NEXT, markup=False)


def fits(console: Console) -> None:
    """Train on a device that is too small for plain training and for transformers' own checkpointing."""
    console.rule("[bold]1  A run that does not fit, and how it does", align="left")
    with console.status("preparing the emulated accelerator (compiled once per torch version, about a minute)"):
        simdevice.enable(memory="4GiB")
    needs = {name: train(make, _steps(console, 2, f"measuring with {name}")).peak_bytes for name, make in WAYS.items()}
    cap = (needs[THEIRS] + needs[OURS]) // 2
    simdevice.enable(memory=cap)
    console.print(
        f"A small Qwen3-VL ({LAYERS} layers, LoRA, one picture) on an emulated accelerator with "
        f"[bold]{format_bytes(cap)}[/] of memory and a clock:"
    )
    outcomes = {name: train(make, _steps(console, STEPS, f"training with {name}")) for name, make in WAYS.items()}
    simdevice.enable(memory="4GiB")
    console.print(_table_of(outcomes, needs))
    applied = outcomes[OURS]
    console.print(f"\n{PLAIN}: {escape(outcomes[PLAIN].error)}", style="dim")
    console.print(f"{OURS}: {escape(applied.report)}\n", style="dim")
    if not outcomes[PLAIN].error or applied.error or applied.losses[-1] >= applied.losses[0]:
        raise DemoError("plain training should run out of memory, and Lowtide's should fit and learn")
    if simdevice.violations():
        raise DemoError(f"the device saw races or early frees: {simdevice.violations()[0]}")


def _steps(console: Console, count: int, title: str) -> Iterator[int]:
    """Yield the numbers of the steps, with a progress bar."""
    with progress_bar(console, title, total=count) as show:
        for step in range(count):
            show(title, step, count)
            yield step


def _table_of(outcomes: dict[str, Outcome], needs: dict[str, int]) -> Table:
    table = Table("training with", "needs", "fits?", "loss", "step, virtual", box=None, pad_edge=False)
    for name, outcome in outcomes.items():
        if outcome.error:
            table.add_row(name, format_bytes(needs[name]), "[red]out of memory[/]")
            continue
        losses = f"{outcome.losses[0]:.2f} -> {outcome.losses[-1]:.2f}"
        table.add_row(name, format_bytes(needs[name]), "[green]yes[/]", losses, f"{outcome.milliseconds:.1f} ms")
    return table


def is_right(console: Console) -> None:
    """Audit the same training; the audit knows nothing about our engine."""
    console.rule("[bold]2  Is it really on, and are the gradients right?", align="left")
    with console.status("auditing: plain steps against ours, on copies of the same weights"):
        model = build().to("sim")
        batch = {name: tensor.to("sim") for name, tensor in make_batch().items()}
        report = lowtide.audit(model, batch, configure=lambda copy: lowtide.apply(copy, POLICY), offload=True)
    _print_checks(console, report.to_dict())


def on_two_ranks(console: Console) -> None:
    """Audit it in two processes with batches of different lengths, and show what reentrant checkpointing does there."""
    console.rule("[bold]3  The same under DDP, two processes, find_unused_parameters=True", align="left")
    with console.status("training on two ranks"):
        found = _run_ranks()
    _print_checks(console, found["audit"])
    said = found["reentrant"].partition(". ")[0] or "no error: this torch accepts it"
    console.print(f"with use_reentrant=True instead: {escape(said)}\n", style="dim")


def _run_ranks() -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(  # noqa: S603
        [*command, "-m", "lowtide.demo.rank"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()  # not kill: torchrun ends its ranks first, and they are in sessions apart
            raise DemoError(f"the ranks gave no result within {PATIENCE:.0f} s: they wait for each other") from None
    if process.returncode:
        raise DemoError(f"a rank failed:\n{errors[-2000:]}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _print_checks(console: Console, report: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in report["checks"]:
        if check["verdict"] != "not applicable":
            colour = "green" if check["verdict"] == "pass" else "red"
            word = check["grade"] or check["verdict"]
            table.add_row(f"[{colour}]{word}[/]", check["name"], escape(check["summary"]))
    console.print(table)
    console.print(escape(report["conclusion"]), style="bold")
    if not report["ok"]:
        raise DemoError("the audit found a fault in our own engine: please report it")
    console.print()


def at_full_size(console: Console) -> None:
    """Plan the real model that the small one stands for: no weights are loaded, and no GPU is needed."""
    asked = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in FULL_SIZE.items() if name != "model")
    console.rule("[bold]4  And at full size?", align="left")
    console.print(f"[bold]lowtide plan {FULL_SIZE['model']} {asked}[/]  [dim](about a minute, the first time)[/]")
    with progress_bar(console, "building the model") as show:
        plan = lowtide.plan(**FULL_SIZE, progress=show)  # type: ignore[arg-type]
    table = Table("fits", "policy", "needs", "host", "step, estimated", box=None, pad_edge=False)
    for candidate in plan.candidates:
        estimate = candidate.estimate
        style = "bold green" if candidate is plan.best else "" if candidate.fits else "dim"
        figures = (format_bytes(candidate.device_bytes), format_bytes(estimate.host_bytes), f"{estimate.seconds:.0f} s")
        table.add_row(candidate.verdict, candidate.policy, *figures, style=style)
    console.print(table)
    if plan.best is None:
        raise DemoError("no policy fits, and one should")
    console.print(
        Panel.fit(
            f"It fits on {FULL_SIZE['ranks']} x {plan.accelerator.name} with [bold]{escape(plan.best.policy)}[/]: "
            f"{format_bytes(plan.best.device_bytes)} of {format_bytes(plan.budget)}",
            border_style="green",
        )
    )
