"""Tiled MLPs side by side: matrix products, peak bytes, time, and in which cases the gradients are right."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from bench import tiled_cases
from bench.apart import apart
from bench.counting import Operators
from bench.figures import Figure, Result, count, verdict
from bench.section import Bars, Rivalry, keep_going
from bench.tiled_cases import CASES, DDP, ENGINES, Mlp
from bench.timing import interleaved
from lowtide import simdevice

if TYPE_CHECKING:
    from bench.section import Say
    from bench.tiled_cases import Engine

TITLE = "Tiled MLPs"
ABOUT = """\
One matrix product is one weight times all tokens (an untiled MLP has 3 in forward and 6 in backward). Peak bytes are
counted on the emulated device for {tokens} tokens, {hidden} wide, {inner} inside, in {shards} tiles, beyond weights,
their gradients and the input. Time is measured for a step with {timed_shards} tiles on the CPU, interleaved, and
divided by the untiled step's. [A separate table](tiling-benchmark.md) shows in which cases the gradients are right."""
COLUMNS = {
    "time": "time over untiled",
    "products": "matrix products",
    "products in a checkpoint": "matrix products inside a checkpoint",
    "peak": "peak bytes",
}
PLOTS = (
    Bars(name="tiling", title="Matrix products of a tiled MLP inside a checkpoint", figure="products in a checkpoint"),
)
RIVALRIES = (
    Rivalry(
        ours="Lowtide",
        theirs=tuple(name for name in ENGINES if name not in ("untiled", "Lowtide")),
        figures=tuple(COLUMNS),
    ),
)
HIDDEN, INNER, TOKENS, SHARDS, TIMED_SHARDS, ROUNDS = 256, 896, 4096, 32, 8, 10


def products(engine: Engine, *, in_checkpoint: bool) -> float:
    """Return the FLOPs, divided by those of one weight times all tokens."""
    mlp, tokens = Mlp(), 320
    x = torch.randn(1, tokens, mlp.hidden, dtype=torch.double, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return engine(mlp, x, 10)

    with Operators() as counted:
        (checkpoint(run, x, use_reentrant=False) if in_checkpoint else run(x)).sum().backward()
    return counted.flops / (2 * tokens * mlp.gate.weight.numel())


def peak_bytes(engine: Engine) -> int:
    """Of forward and backward, over weights, their gradients and the input."""
    mlp = Mlp(HIDDEN, INNER, torch.float32).to("sim")
    x = torch.randn(1, TOKENS, HIDDEN, device="sim", requires_grad=True)
    torch.accelerator.synchronize()
    simdevice.reset()
    base = simdevice.stats().live_bytes
    engine(mlp, x, SHARDS).backward(torch.ones(1, TOKENS, HIDDEN, device="sim"))
    torch.accelerator.synchronize()
    return simdevice.stats().peak_bytes - base - sum(p.nbytes for p in mlp.parameters())


def counted(name: str) -> dict[str, Figure]:
    simdevice.enable(memory="8GiB")
    engine = ENGINES[name]()
    return {
        "products": count(products(engine, in_checkpoint=False)),
        "products in a checkpoint": count(products(engine, in_checkpoint=True)),
        "peak": count(peak_bytes(engine), "bytes"),
    } | {case: verdict(tiled_cases.verdict(case, engine)) for case in CASES}


def under_ddp(name: str) -> dict[str, Figure]:
    ENGINES[name]()  # imported here once, and not in every rank
    return {
        case: verdict("right" if tiled_cases.under_ddp(name, options) else "fails") for case, options in DDP.items()
    }


def counts(name: str) -> dict[str, Figure]:
    return apart(counted, name) | apart(under_ddp, name)


def times(names: tuple[str, ...]) -> dict[str, Figure]:
    mlp = Mlp(HIDDEN, INNER, torch.float32)
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)

    def step(engine: Engine) -> Any:
        return lambda: engine(mlp, x, TIMED_SHARDS).sum().backward()

    return interleaved({name: step(ENGINES[name]()) for name in names}, against="untiled", rounds=ROUNDS)


def measure(say: Say, *, only: tuple[str, ...] = tuple(ENGINES), timed: bool = True) -> Result:
    torch.set_num_threads(1)
    rows, left_out = keep_going({name: functools.partial(counts, name) for name in only}, say)
    if timed:
        say("time", len(only), len(only) + 1)
        for name, figure in apart(times, tuple(rows)).items():
            rows[name]["time"] = figure
    setting = {"hidden": HIDDEN, "inner": INNER, "tokens": TOKENS, "shards": SHARDS, "timed_shards": TIMED_SHARDS}
    return Result(setting, rows, left_out)
