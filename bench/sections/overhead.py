"""What a checkpointed region costs beside torch's own: in time, interleaved, and in operators, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from bench import models
from bench.counting import Operators
from bench.figures import Figure, Result, count
from bench.section import Bars, Rivalry
from bench.timing import interleaved

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.section import Say

    Step = Callable[[], object]

TITLE = "Step overhead beside torch's checkpoint"
ABOUT = """\
Training steps on the CPU with one thread, in turns; a ratio is the median over {tiny_rounds} or {llama_rounds} rounds,
with its quartiles. {tiny_layers} layers of 8 units each are so small that only Python is timed; in the Llama
({llama[layers]} layers, {llama[width]} wide, {llama[tokens]} tokens) arithmetic begins to count. Operators, and the
matrix products among them, are counted as torch dispatches them in forward and backward."""
COLUMNS = {
    "time, tiny layers": "time over torch's, tiny layers",
    "operators, tiny layers": "operators, tiny layers",
    "products, tiny layers": "matrix products, tiny layers",
    "time, Llama": "time over torch's, Llama",
    "operators, Llama": "operators, Llama",
    "products, Llama": "matrix products, Llama",
}
PLOTS = (Bars(name="overhead", title="Step time over torch's checkpoint, tiny layers", figure="time, tiny layers"),)
THEIRS = "torch checkpoint"
RIVALRIES = tuple(
    Rivalry(ours=ours, theirs=(THEIRS,), figures=tuple(COLUMNS)) for ours in ("lowtide.checkpoint", "lowtide.apply")
)
TINY_LAYERS, TINY_ROUNDS, LLAMA_ROUNDS = 50, 100, 20
LLAMA = {"layers": 4, "width": 128, "tokens": 256}


def tiny_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(TINY_LAYERS))


def tiny_step(layers: nn.ModuleList, run: Callable[..., torch.Tensor]) -> Step:
    def step() -> None:
        x = torch.ones(1, 8, requires_grad=True)
        for layer in layers:
            x = run(layer, x)
        x.sum().backward()

    return step


def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def theirs(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def tiny_steps() -> dict[str, Step]:
    applied = tiny_layers()
    lowtide.apply(applied, "recompute")
    layers = tiny_layers()
    return {
        THEIRS: tiny_step(layers, theirs),
        "no checkpoint": tiny_step(layers, call),
        "lowtide.checkpoint": tiny_step(layers, lowtide.checkpoint),
        "lowtide.apply": tiny_step(applied, call),
    }


def llama_steps() -> dict[str, Step]:
    from transformers import PreTrainedModel

    def step(prepare: Callable) -> Step:
        model, batch = models.llama(**LLAMA)
        prepare(model)

        def run() -> None:
            model(**batch).loss.backward()

        return run

    return {
        THEIRS: step(PreTrainedModel.gradient_checkpointing_enable),
        "no checkpoint": step(lambda _: None),
        "lowtide.apply": step(lambda model: lowtide.apply(model, "recompute")),
    }


def counts(steps: dict[str, Step], model: str) -> dict[str, dict[str, Figure]]:
    """Of a second step: the first makes what is lazy."""
    found = {}
    for name, step in steps.items():
        step()
        with Operators() as counted:
            step()
        found[name] = {
            f"operators, {model}": count(counted.all),
            f"products, {model}": count(counted.products),
        }
    return found


def measure(say: Say) -> Result:
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Figure]] = {}
    kinds = {"tiny layers": (tiny_steps, TINY_ROUNDS), "Llama": (llama_steps, LLAMA_ROUNDS)}
    for done, (model, (make, rounds)) in enumerate(kinds.items()):
        say(model, done, len(kinds))
        steps = make()
        found = counts(steps, model)
        for name, timed in interleaved(steps, against=THEIRS, rounds=rounds).items():
            rows.setdefault(name, {}).update({f"time, {model}": timed} | found[name])
    setting = {"tiny_layers": TINY_LAYERS, "tiny_rounds": TINY_ROUNDS, "llama_rounds": LLAMA_ROUNDS, "llama": LLAMA}
    return Result(setting, rows)
