"""Blocks in tiles, attention included: peak bytes from 4096 to 32768 tokens, FLOPs and time, beside tiled MLPs."""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING

import torch
from torch import nn

from bench import models, ways
from bench.apart import apart
from bench.counting import AttentionFlops
from bench.figures import Figure, Result, count
from bench.section import Bars, Lines, Rivalry, keep_going
from bench.tiled_cases import ENGINES
from bench.timing import interleaved
from lowtide import simdevice

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

    from bench.section import Say
    from bench.tiled_cases import Engine

TITLE = "Blocks in tiles, attention included"
ABOUT = """\
A training step of a Qwen3 with {layers} layers, {width} wide, in bf16, with {heads} heads of queries for each head of
keys and a vocabulary of 512, one sequence in {tiles} tiles, on the emulated device. Peaks are those of the whole step
beyond weights, their gradients and the batch, in hidden states (tokens x width x 2 bytes): where memory grows with the
length and no faster, the number is the same for all lengths. `tile` means `tile(attention, mlp, loss)`. With two
layers, offload takes nothing off the peak: in backward, the inputs of both are on the device. "Violations" are those
that the device's race detector found.

FLOPs are counted from the shapes of matrix products and of attention, in which a causal square counts half.
"Attention computed" is the FLOPs of attention's forward over those of one forward.

Time is CPU time of a step of one float32 layer, {timed_width} wide, in {tiles} tiles on one thread, divided by that of
`recompute` in the same round ({rounds[8K]} rounds at 8192 tokens, {rounds[32K]} at 32768). Nearly all of it is
attention. The tiled MLPs of DeepSpeed, Liger and unsloth run in a layer that torch checkpoints; they are not meant to
tile attention, and are here to show what is left when an MLP alone is tiled."""
LENGTHS = {"4K": 4096, "8K": 8192, "16K": 16384, "32K": 32768}
COLUMNS = (
    {f"peak, {name}": f"peak, {length} tokens" for name, length in LENGTHS.items()}
    | {f"flops, {name}": f"FLOPs, {LENGTHS[name]} tokens" for name in ("8K", "32K")}
    | {"attention": "attention computed"}
    | {f"time, {name}": f"time over recompute, {LENGTHS[name]} tokens" for name in ("8K", "32K")}
    | {"violations": "violations"}
)
OURS = {
    "Lowtide recompute": "recompute",
    "Lowtide recompute+tile(mlp, loss)": "recompute+tile(mlp, loss, {sizes})",
    "Lowtide recompute+offload+tile(mlp, loss)": "recompute+offload+tile(mlp, loss, {sizes})",
    "Lowtide recompute+tile": "recompute+tile({sizes})",
    "Lowtide recompute+offload+tile": "recompute+offload+tile({sizes})",
    "Lowtide recompute(keep=attention)+tile": "recompute(keep=attention)+tile({sizes})",
}
PEERS = tuple(name for name in ENGINES if name not in ("untiled", "Lowtide"))
PLOTS = (
    Lines(
        name="attention",
        title="Peak of a step, in hidden states",
        figures={f"peak, {name}": str(length) for name, length in LENGTHS.items()},
        rows=("Lowtide recompute", "Lowtide recompute+offload+tile(mlp, loss)", "Lowtide recompute+offload+tile"),
        axis="tokens",
        against="",
    ),
    Bars(name="attention-peak", title="Peak of a step at 8192 tokens, in hidden states", figure="peak, 8K"),
)
RIVALRIES = (
    Rivalry(
        ours="Lowtide recompute+tile",
        theirs=PEERS,
        figures=tuple(figure for figure in COLUMNS if figure not in ("attention", "violations")),
    ),
)
LAYERS, WIDTH, TILES, TIMED_WIDTH = 2, 256, 16, 64
ROUNDS = {"8K": 7, "32K": 3}
FOR_PEERS = {name: LENGTHS[name] for name in ("8K", "32K")}
"""The lengths at which peers are counted: a step at 32768 tokens takes a minute on the emulated device."""


class TiledMlp(nn.Module):
    """An MLP that a peer's engine runs."""

    def __init__(self, mlp: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.mlp, self.engine = mlp, engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.engine(self.mlp, x, TILES)


def way_of(name: str, tokens: int) -> ways.Way:
    if name in OURS:
        size = tokens // TILES
        return ways.ours(OURS[name].format(sizes=f"tokens={size}, loss_tokens={size}"))
    engine = ENGINES[name]()

    def way(model: PreTrainedModel) -> AbstractContextManager:
        for layer in model.model.layers:
            layer.mlp = TiledMlp(layer.mlp, engine)
        return ways.flag()(model)

    return way


def on_device(name: str, tokens: int) -> dict[str, float]:
    """Return the counts of one step. A step of two tiles goes before it, and makes what is lazy."""
    simdevice.enable(memory="8GiB")
    model, batch = models.qwen3(layers=LAYERS, width=WIDTH, tokens=tokens, dtype=torch.bfloat16)
    model, batch = model.to("sim"), {key: value.to("sim") for key, value in batch.items()}
    context = way_of(name, tokens)(model)
    model(**{key: value[:, : 2 * tokens // TILES] for key, value in batch.items()}).loss.backward()
    model.zero_grad(set_to_none=False)
    gc.collect()
    torch.accelerator.synchronize()
    simdevice.reset()
    base = simdevice.stats().live_bytes
    with context, AttentionFlops() as counted:
        model(**batch).loss.backward()
    torch.accelerator.synchronize()
    one_forward = LAYERS * WIDTH * 2 * tokens**2  # two products of queries and keys, of which a half is computed
    return {
        "peak": round((simdevice.stats().peak_bytes - base) / (tokens * WIDTH * 2), 2),
        "flops": counted.flops + counted.attention_forward + counted.attention_backward,
        "attention": round(counted.attention_forward / one_forward, 2),
        "violations": len(simdevice.violations()),
    }


def counts(name: str, lengths: dict[str, int]) -> dict[str, Figure]:
    found = {length: apart(on_device, name, tokens) for length, tokens in lengths.items()}
    figures = {f"peak, {length}": count(one["peak"]) for length, one in found.items()}
    figures |= {f"flops, {length}": count(one["flops"], "FLOPs") for length, one in found.items()}
    return {figure: value for figure, value in figures.items() if figure in COLUMNS} | {
        "attention": count(found["8K"]["attention"]),
        "violations": count(sum(one["violations"] for one in found.values())),
    }


def times(names: tuple[str, ...], length: str) -> dict[str, Figure]:
    runs = {name: _step(name, LENGTHS[length]) for name in names if "offload" not in name}
    return interleaved(runs, against="Lowtide recompute", rounds=ROUNDS[length])


def _step(name: str, tokens: int) -> functools.partial[None]:
    model, batch = models.qwen3(layers=1, width=TIMED_WIDTH, tokens=tokens)
    return functools.partial(_train, model, batch, way_of(name, tokens)(model))


def _train(model: PreTrainedModel, batch: dict[str, torch.Tensor], context: AbstractContextManager) -> None:
    with context:
        model(**batch).loss.backward()


def measure(say: Say, only: tuple[str, ...] = (*OURS, *PEERS), *, timed: bool = True) -> Result:
    torch.set_num_threads(1)
    models.qwen3(layers=1, width=64, tokens=8)  # imported here once, and not in every fork
    lengths = {name: LENGTHS if name in OURS else FOR_PEERS for name in only}
    rows, left_out = keep_going({name: functools.partial(counts, name, lengths[name]) for name in only}, say)
    for done, length in enumerate(ROUNDS if timed else ()):
        say(f"time, {length}", done, len(ROUNDS))
        for name, figure in apart(times, tuple(rows), length).items():
            rows[name][f"time, {length}"] = figure
    setting = {"layers": LAYERS, "width": WIDTH, "heads": 4, "tiles": TILES, "timed_width": TIMED_WIDTH}
    return Result(setting | {"rounds": ROUNDS}, rows, left_out)
