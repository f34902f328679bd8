"""What compiled layers gain, and what is left of it with checkpoints and tiles: in time, and in graphs, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import lowtide
from bench import models
from bench.figures import Figure, Result, count, verdict
from bench.section import Bars, Rivalry
from bench.timing import interleaved

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from bench.section import Say

    Prepare = Callable[[PreTrainedModel, str], object]

TITLE = "Compiled models"
ABOUT = """\
Training steps of a Llama ({llama[layers]} layers, {llama[width]} wide, {llama[tokens]} tokens) on the CPU with one
thread, in turns; a ratio is the median over {rounds} rounds, with its quartiles. `torch.compile` makes kernels with
inductor, of each layer (`layer.compile()`) or of the whole model (`model.compile()`). Compiling is not part of the
time.

Graphs and their breaks are those of {layers} layers that share their code: after a first step, and after steps with
{lengths} other numbers of tokens. Gradients are compared with those of the model that is not compiled."""
COLUMNS = {
    "time": "time over plain",
    "graphs": "graphs",
    "breaks": "graph breaks",
    "graphs, other lengths": "graphs after other lengths",
    "gradients": "gradients",
}
PLOTS = (Bars(name="compiled", title="Step time over the plain model, compiled and not", figure="time"),)
LLAMA = {"layers": 4, "width": 128, "tokens": 256}
ROUNDS = 20
PLAIN = "plain"
THEIRS = "layers compiled, torch checkpoint"
OURS = "layers compiled, Lowtide recompute"
RIVALRIES = (Rivalry(ours=OURS, theirs=(THEIRS,), figures=("time", "graphs", "breaks", "graphs, other lengths")),)
OTHER_LENGTHS = (200, 250, 131, 256)
ACCURACY = 1e-4
"""What gradients in float32 may differ by, as a share of their norm: kernels and tiles sum in other orders."""


def layers(model: PreTrainedModel, backend: str) -> None:
    for layer in model.model.layers:
        layer.compile(backend=backend)


def whole(model: PreTrainedModel, backend: str) -> None:
    model.compile(backend=backend)


def torch_checkpoint(model: PreTrainedModel, backend: str) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers(model, backend)


def ours(policy: str, compile_it: Prepare) -> Prepare:
    def prepare(model: PreTrainedModel, backend: str) -> None:
        lowtide.apply(model, policy)
        compile_it(model, backend)

    return prepare


TILES = LLAMA["tokens"] // 4
WAYS: dict[str, Prepare] = {
    PLAIN: lambda *_: None,
    "Lowtide recompute, not compiled": ours("recompute", lambda *_: None),
    "layers compiled": layers,
    THEIRS: torch_checkpoint,
    OURS: ours("recompute", layers),
    "layers compiled, recompute+tile(mlp)": ours(f"recompute+tile(mlp, tokens={TILES})", layers),
    "layers compiled, recompute+tile(attention)": ours(f"recompute+tile(attention, tokens={TILES})", layers),
    "model compiled": whole,
    "model compiled, Lowtide recompute": ours("recompute", whole),
}


def gradients(model: PreTrainedModel, batch: dict[str, torch.Tensor], length: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(**{name: value[:, :length] for name, value in batch.items()}).loss.backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((one - two).norm() / two.norm()) for one, two in zip(found, expected, strict=True))


def counts(prepare: Prepare) -> dict[str, Figure]:
    """Graphs of a fresh compiler that makes no kernels: how a model is cut does not depend on them."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, batch = models.llama(**LLAMA)
    model, _ = models.llama(**LLAMA)
    prepare(model, "aot_eager")
    worst = error(gradients(model, batch, LLAMA["tokens"]), gradients(plain, batch, LLAMA["tokens"]))
    first = graphs_and_breaks(counters)
    for length in OTHER_LENGTHS:
        worst = max(worst, error(gradients(model, batch, length), gradients(plain, batch, length)))
    found = {"gradients": verdict("right" if worst < ACCURACY else f"off by {worst:.1e}")}
    if first[0]:
        found |= {
            "graphs": count(first[0]),
            "breaks": count(first[1]),
            "graphs, other lengths": count(graphs_and_breaks(counters)[0]),
        }
    return found


def graphs_and_breaks(counters: dict[str, Any]) -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def timed_step(prepare: Prepare) -> Callable[[], object]:
    model, batch = models.llama(**LLAMA)
    prepare(model, "inductor")
    return lambda: gradients(model, batch, LLAMA["tokens"])


def measure(say: Say) -> Result:
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Figure]] = {}
    for done, (name, prepare) in enumerate(WAYS.items()):
        say(name, done, len(WAYS) + 1)
        rows[name] = counts(prepare)
    torch._dynamo.reset()
    say("time", len(WAYS), len(WAYS) + 1)
    steps = {name: timed_step(prepare) for name, prepare in WAYS.items()}
    for name, timed in interleaved(steps, against=PLAIN, rounds=ROUNDS).items():
        rows[name] = {"time": timed} | rows[name]
    setting = {"llama": LLAMA, "layers": LLAMA["layers"], "rounds": ROUNDS, "lengths": len(OTHER_LENGTHS)}
    return Result(setting, rows)
