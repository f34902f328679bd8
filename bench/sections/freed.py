"""What a training step holds on the device: ways to hold activations side by side, in counted bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from bench import models
from bench.apart import apart
from bench.figures import Figure, Result, count, verdict
from bench.section import Bars, Rivalry, keep_going
from bench.sim_step import SimStep
from bench.ways import WAYS

if TYPE_CHECKING:
    from bench.section import Say

TITLE = "Freed bytes"
ABOUT = """\
One training step of two transformers models on the emulated device, {layers} layers, {width} wide, {tokens} tokens,
fp32. "Held after forward" is what the graph keeps on the device; the layers' inputs alone are {boundary}. The peak is
counted over the whole step, beyond weights and gradients. Moved bytes went from the device to the host. The second
model, a Llama 4 vision tower, passes the hidden state to its layers as a keyword: what hooks around a checkpoint do not
see stays where it is, and no error says so. Gradients are compared bit by bit with the plain model's.

Lowtide leaves the input of the last layer on the device, because backward needs it at once. A set-up that copies
everything holds one layer's input less, and waits for it. `save_on_cpu` moves parameters, too, on the compute stream.
unsloth_zoo knows its devices by name: on this one its hooks take their simple path, and its smart checkpointing moves
nothing."""
MODELS = {"Llama": models.llama, "vision tower": models.llama4_vision}
COLUMNS = {
    f"{figure}, {model}": f"{title}, {model}"
    for model in MODELS
    for figure, title in (
        ("held", "held after forward"),
        ("peak", "peak"),
        ("moved", "moved"),
        ("gradients", "gradients"),
    )
}
PLOTS = (
    Bars(
        name="freed",
        title="Held on the device after forward, a Llama",
        figure="held, Llama",
        verdict="gradients, Llama",
    ),
    Bars(
        name="freed-keywords",
        title="Held where hidden states are keywords, a vision tower",
        figure="held, vision tower",
        verdict="gradients, vision tower",
    ),
)
_OFFLOADING = (
    "transformers' flag, offload=True",
    "transformers' flag + TRL offload",
    "ArcticTraining offload, reentrant",
    "unsloth_zoo non-reentrant hooks",
)
_BYTES = tuple(f"{figure}, {model}" for model in MODELS for figure in ("held", "peak"))
_VERDICTS = {figure: f"gradients, {figure.partition(', ')[2]}" for figure in _BYTES}
RIVALRIES = tuple(
    Rivalry(ours=ours, theirs=theirs, figures=_BYTES, if_right=_VERDICTS)
    for ours, theirs in (
        ("Lowtide recompute", ("transformers' flag (torch checkpoint)",)),
        ("Lowtide recompute+offload", _OFFLOADING),
        ("Lowtide offload", ("torch save_on_cpu", "TRL offload")),
    )
)
SIZE = {"layers": 6, "width": 64, "tokens": 400}


def measure(say: Say, only: tuple[str, ...] = tuple(WAYS)) -> Result:
    torch.set_num_threads(1)
    for make in MODELS.values():
        make(**SIZE)  # imported here once, and not in every fork
    rows, left_out = keep_going({name: functools.partial(both_models, name) for name in only}, say)
    boundary = SIZE["layers"] * SIZE["width"] * SIZE["tokens"] * 4
    return Result(SIZE | {"boundary": boundary}, rows, left_out)


def both_models(way: str) -> dict[str, Figure]:
    found = {}
    for model in MODELS:
        figures = apart(one, model, way)
        found |= {f"{figure}, {model}": count(figures[figure], "bytes") for figure in ("held", "peak", "moved")}
        found[f"gradients, {model}"] = verdict(figures["gradients"])
    return found


def one(model: str, way: str) -> dict[str, float]:
    return SimStep(MODELS[model](**SIZE), WAYS[way]).run()
