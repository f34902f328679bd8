"""How long a step takes on the emulated device's clock: exact, and the same on every machine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from bench import models
from bench.apart import apart
from bench.figures import Figure, Result, count
from bench.section import Lines, Rivalry, keep_going
from bench.sim_step import DEVICE, SimStep
from bench.ways import WAYS
from lowtide import simdevice

if TYPE_CHECKING:
    from bench.section import Say

TITLE = "Step time on the virtual clock"
ABOUT = """\
A Llama ({layers} layers, {width} wide, {tokens} tokens) on a device with {flops:g} FLOP/s. The columns are different
speeds of the link to the host, in each direction. Time is virtual: a kernel's time follows from its FLOPs and bytes, a
copy's from the link, and work on different engines overlaps. The clock ranks ways to hold activations; it does not
predict a GPU's milliseconds. Where the link can carry the layers' inputs while the layers compute, offload that
overlaps costs nothing.

Pinned memory is what the host's allocator gave out: Lowtide takes slabs of 4 MiB and more, which a model of this size
does not fill, and ArcticTraining copies to memory that is not pinned. Broken rules are races and early frees that the
device found."""
LINKS = (0.5, 1, 2, 4, 8)
"""GB/s."""
COLUMNS = {f"{link} GB/s": f"step, {link} GB/s" for link in LINKS} | {
    "flops": "FLOPs",
    "pinned": "pinned",
    "violations": "broken rules",
}
_OFFLOADING = (
    "transformers' flag, offload=True",
    "transformers' flag + TRL offload",
    "ArcticTraining offload, reentrant",
    "unsloth_zoo non-reentrant hooks",
)
PLOTS = (
    Lines(
        name="virtual-clock",
        title="Virtual step time, ratio to plain",
        figures={f"{link} GB/s": f"{link}" for link in LINKS},
        rows=("Lowtide recompute+offload", "transformers' flag (torch checkpoint)", *_OFFLOADING),
        axis="GB/s of the link to the host",
    ),
)
_TIMES = tuple(f"{link} GB/s" for link in LINKS)
RIVALRIES = (
    Rivalry(ours="Lowtide recompute", theirs=("transformers' flag (torch checkpoint)",), figures=_TIMES),
    Rivalry(ours="Lowtide recompute+offload", theirs=_OFFLOADING, figures=(*_TIMES, "pinned")),
    Rivalry(ours="Lowtide offload", theirs=("torch save_on_cpu", "TRL offload"), figures=(*_TIMES, "pinned")),
)
SIZE = {"layers": 6, "width": 128, "tokens": 256}


def measure(say: Say, only: tuple[str, ...] = tuple(WAYS)) -> Result:
    torch.set_num_threads(1)
    models.llama(**SIZE)  # imported here once, and not in every fork
    rows, left_out = keep_going({name: functools.partial(all_links, name) for name in only}, say)
    return Result(SIZE | {"flops": DEVICE["flops"], "bandwidth": DEVICE["bandwidth"]}, rows, left_out)


def all_links(way: str) -> dict[str, Figure]:
    by_link = apart(steps, way)
    figures = {f"{link} GB/s": count(found["time"], "s, virtual") for link, found in by_link.items()}
    last = by_link[LINKS[-1]]
    figures["flops"] = count(last["flops"], "FLOPs")
    figures["pinned"] = count(last["pinned"], "bytes")
    figures["violations"] = count(sum(found["violations"] for found in by_link.values()))
    return figures


def steps(way: str) -> dict[float, dict[str, float]]:
    """By link: the same model and engine, with other rates each time."""
    step = SimStep(models.llama(**SIZE), WAYS[way])
    step.run()
    found = {}
    for link in LINKS:
        simdevice.enable(h2d=link * 1e9, d2h=link * 1e9)
        found[link] = step.run_once()
    return found
