"""Recompute that keeps attention, beside torch's selective checkpointing and TRL's: time, operators, and bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from bench import models
from bench.apart import apart
from bench.counting import Operators
from bench.figures import Figure, Result, count, verdict
from bench.section import Bars, Rivalry, keep_going
from bench.sim_step import SimStep
from bench.timing import interleaved
from bench.ways import ATTENTION, SELECTIVE_WAYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.section import Say

    Step = Callable[[], object]

TITLE = "Recompute that keeps attention"
ABOUT = """\
Time is that of training steps on the CPU with one thread, in turns: medians over {tiny_rounds} or {llama_rounds} rounds
as ratios to Lowtide's own `recompute`, with quartiles. {tiny_layers} transformer layers of 8 units each are so small
that only Python is timed; in the Llama ({llama[layers]} layers, {llama[width]} wide, {llama[tokens]} tokens) arithmetic
begins to count. Operators are counted as torch dispatches them in forward and backward, and so is how often attention
is computed: once for each layer if its output is kept.

Bytes and virtual time are those of a Llama with {device[layers]} layers, {device[width]} wide, {device[tokens]} tokens
on the emulated device, with a link of {link} GB/s. TRL tells attention by a list of torch's operators, in which the one
of such a device (`_scaled_dot_product_fused_attention_overrideable`) is missing: there it recomputes everything, and no
error says so. Torch's selective checkpoint was given the operator in its list."""
TINY, LLAMA, DEVICE = "tiny layers", "Llama", "device"
COLUMNS = {
    f"{figure}, {model}": f"{title}, {model}"
    for model in (TINY, LLAMA)
    for figure, title in (
        ("time", "time over Lowtide's recompute"),
        ("operators", "operators"),
        ("attention", "attention computed"),
    )
} | {
    "held": "held after forward",
    "peak": "peak",
    "step": "step, virtual",
    "kept": "attention kept",
    "gradients": "gradients",
}
PLOTS = (
    Bars(name="selective", title="Step time over Lowtide's recompute, tiny layers", figure=f"time, {TINY}"),
    Bars(
        name="selective-step",
        title="Virtual step time, a Llama on the emulated device",
        figure="step",
        verdict="kept",
    ),
)
BASE, OURS = "Lowtide recompute", "Lowtide recompute(keep=attention)"
RIVALRIES = (
    Rivalry(
        ours=OURS,
        theirs=("torch selective checkpoint", "TRL selective"),
        figures=tuple(name for name in COLUMNS if name not in ("kept", "gradients")),
        if_right=dict.fromkeys(("held", "peak", "step"), "kept"),
    ),
    Rivalry(
        ours=BASE,
        theirs=("torch checkpoint",),
        figures=tuple(name for name in COLUMNS if name not in ("kept", "gradients")),
    ),
)
TINY_LAYERS, TINY_ROUNDS, LLAMA_ROUNDS, LINK = 20, 100, 40, 4
LLAMA_SIZE = {"layers": 4, "width": 128, "tokens": 256}
DEVICE_SIZE = {"layers": 6, "width": 128, "tokens": 256}


class TinyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project_in, self.project_out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.view(1, -1, 2, 4).transpose(1, 2) for part in self.project_in(x).chunk(3, -1))
        return self.project_out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class TinyLayer(nn.Module):
    """A transformer layer whose parts are as usual, and whose arithmetic is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.attention = TinyAttention()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def tiny_layers(policy: str = "none") -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(TinyLayer() for _ in range(TINY_LAYERS))
    lowtide.apply(layers, policy)
    return layers


def tiny_step(layers: nn.ModuleList, run: Callable[..., torch.Tensor] = nn.Module.__call__) -> Step:
    def step() -> None:
        x = torch.ones(1, 4, 8, requires_grad=True)
        for layer in layers:
            x = run(layer, x)
        x.sum().backward()

    return step


def tiny_steps() -> dict[str, Step]:
    torch_checkpoint = functools.partial(checkpoint, use_reentrant=False)
    operators = [getattr(torch.ops.aten, name).default for name in ATTENTION]
    context = functools.partial(create_selective_checkpoint_contexts, operators)
    return {
        "plain": tiny_step(tiny_layers()),
        BASE: tiny_step(tiny_layers("recompute")),
        OURS: tiny_step(tiny_layers("recompute(keep=attention)")),
        "torch checkpoint": tiny_step(tiny_layers(), torch_checkpoint),
        "torch selective checkpoint": tiny_step(tiny_layers(), functools.partial(torch_checkpoint, context_fn=context)),
    }


def llama_step(way: str) -> Step:
    model, batch = models.llama(**LLAMA_SIZE)
    context = SELECTIVE_WAYS[way](model)

    def step() -> None:
        with context:
            model(**batch).loss.backward()

    return step


def llama_steps() -> dict[str, Step]:
    """All but offload: on the CPU there is nothing to offload from."""
    return {way: llama_step(way) for way in SELECTIVE_WAYS if "offload" not in way}


def counts(step: Step, model: str) -> dict[str, Figure]:
    """Of a third step: the first two make what is lazy, and show where attention is."""
    for _ in range(2):
        step()
    with Operators() as counted:
        step()
    return {f"operators, {model}": count(counted.all), f"attention, {model}": count(counted.attention)}


def measure(say: Say) -> Result:
    torch.set_num_threads(1)
    models.llama(**DEVICE_SIZE)  # imported here once, and not in every fork
    device, left_out = keep_going({way: functools.partial(on_device, way) for way in SELECTIVE_WAYS}, say)
    rows: dict[str, dict[str, Figure]] = {way: {} for way in SELECTIVE_WAYS if way not in left_out}
    for done, (model, make, rounds) in enumerate(((TINY, tiny_steps, TINY_ROUNDS), (LLAMA, llama_steps, LLAMA_ROUNDS))):
        say(model, done, 2)
        steps = make()
        found = {name: counts(step, model) for name, step in steps.items()}
        for name, timed in interleaved(steps, against=BASE, rounds=rounds).items():
            rows[name] |= {f"time, {model}": timed} | found[name]
    for name, figures in device.items():
        rows[name] |= figures
    setting = {
        "tiny_layers": TINY_LAYERS,
        "tiny_rounds": TINY_ROUNDS,
        "llama_rounds": LLAMA_ROUNDS,
        "llama": LLAMA_SIZE,
        "device": DEVICE_SIZE,
        "link": LINK,
    }
    return Result(setting, rows, left_out)


def on_device(way: str) -> dict[str, Figure]:
    found, attention = apart(_on_device, way)
    figures = {figure: count(found[figure], "bytes") for figure in ("held", "peak")}
    figures |= {"step": count(found["time"], "s, virtual"), "gradients": verdict(found["gradients"])}
    if way not in ("plain", BASE, "torch checkpoint"):
        figures["kept"] = verdict("right" if attention == DEVICE_SIZE["layers"] else "recomputed")
    return figures


def _on_device(way: str) -> tuple[dict[str, float], int]:
    """Of a third step, as above; and how often attention was computed in a fourth."""
    step = SimStep(models.llama(**DEVICE_SIZE), SELECTIVE_WAYS[way], h2d=LINK * 1e9, d2h=LINK * 1e9)
    step.run()
    found = step.run_once()
    with Operators() as counted:
        step.run_once()
    return found, counted.attention
