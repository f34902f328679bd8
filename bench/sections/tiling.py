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

TITLE = "Tiled MLPs"
ABOUT = """\
Matrix products count one weight against all tokens as 1 (an untiled MLP: 3 forward, 6 backward). Peak bytes are those
of {tokens} tokens, {hidden} wide, {inner} inside, in {shards} tiles, over weights, their gradients and the input,
counted on the emulated device. Time is that of a step with {timed_shards} tiles on the CPU over the untiled one,
interleaved. In which cases the gradients are right is in [a table of its own](tiling-benchmark.md)."""
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
    Rivalry(ours="Lowtide", theirs=tuple(name for name in ENGINES if name != "Lowtide"), figures=tuple(COLUMNS)),
)
HIDDEN, INNER, TOKENS, SHARDS, TIMED_SHARDS, ROUNDS = 256, 896, 4096, 32, 8, 10
UNITS = 9
"""Matrix products of an untiled MLP."""


def flops(name: str, *, in_checkpoint: bool) -> int:
    engine, mlp = ENGINES[name](), Mlp()
    x = torch.randn(1, 320, 32, dtype=torch.double, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return engine(mlp, x, 10)

    with Operators() as counted:
        (checkpoint(run, x, use_reentrant=False) if in_checkpoint else run(x)).sum().backward()
    return counted.flops


def peak_bytes(name: str) -> int:
    """Of forward and backward, over weights, their gradients and the input."""
    simdevice.enable(memory="8GiB")
    engine, mlp = ENGINES[name](), Mlp(HIDDEN, INNER, torch.float32).to("sim")
    x = torch.randn(1, TOKENS, HIDDEN, device="sim", requires_grad=True)
    torch.accelerator.synchronize()
    simdevice.reset()
    base = simdevice.stats().live_bytes
    engine(mlp, x, SHARDS).backward(torch.ones(1, TOKENS, HIDDEN, device="sim"))
    torch.accelerator.synchronize()
    return simdevice.stats().peak_bytes - base - sum(p.nbytes for p in mlp.parameters())


def judged(name: str) -> dict[str, str]:
    engine = ENGINES[name]()
    return {case: tiled_cases.verdict(case, engine) for case in CASES}


def counts(name: str) -> dict[str, Figure]:
    unit = apart(functools.partial(flops, "untiled", in_checkpoint=False)) / UNITS
    found = {
        "products": count(apart(functools.partial(flops, name, in_checkpoint=False)) / unit),
        "products in a checkpoint": count(apart(functools.partial(flops, name, in_checkpoint=True)) / unit),
        "peak": count(apart(peak_bytes, name), "bytes"),
    }
    found |= {case: verdict(words) for case, words in apart(judged, name).items()}
    return found | {
        case: verdict("right" if tiled_cases.under_ddp(name, options) else "fails") for case, options in DDP.items()
    }


def times(names: tuple[str, ...]) -> dict[str, Figure]:
    mlp = Mlp(HIDDEN, INNER, torch.float32)
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)

    def step(engine: tiled_cases.Engine) -> Any:
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
