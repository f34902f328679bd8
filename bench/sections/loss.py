"""Losses that never hold all logits, side by side: peak bytes, FLOPs, time, and whether the gradients are right."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from bench import peers
from bench.apart import apart
from bench.figures import Figure, Result, count, measured, verdict
from bench.section import Bars, Rivalry, keep_going
from bench.timing import interleaved
from lowtide import simdevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.section import Say

    Loss = Callable[[torch.Tensor, nn.Parameter, torch.Tensor], torch.Tensor]
    """Of hidden states `[tokens, width]`, the head's weight and labels: the mean over labels that count."""

TITLE = "The loss"
ABOUT = """\
A head's mean cross entropy and its gradients: {tokens} tokens, {width} wide, {classes} classes, bf16. Peak bytes are
counted on the emulated device, beyond hidden states, weight and their gradients; matrix products are counted by their
FLOPs. Liger's own rule makes its chunks {chunk} tokens here. Lowtide uses the same size in one row, and its default in
the other, which is chosen by bytes and is one tile at this size. Lowtide sums the weight's gradient in fp32, which
takes {sums} here; DeepSpeed and unsloth_zoo sum in bf16. Time is measured for forward and backward in fp32 on the CPU,
interleaved, and divided by the plain loss's. Liger's kernels run on Triton's interpreter here, so they have counts and
no time; unsloth_zoo's are made to be compiled, and run eagerly here. Verdicts are for fp32: for the plain case, with
the loss scaled before backward, and with the first third of the labels ignored."""
COLUMNS = {
    "peak": "peak bytes",
    "products": "matrix products",
    "time": "time over plain",
    "mean": "gradients",
    "scaled": "scaled loss",
    "ignored": "uneven ignored labels",
}
PLOTS = (Bars(name="loss", title="Peak bytes of the loss, over inputs and gradients", figure="peak", verdict="scaled"),)
TOKENS, WIDTH, CLASSES, ROUNDS = 512, 256, 8192, 7
CHUNK = TOKENS // (CLASSES // WIDTH)
ACCURACY = 1e-4
IGNORED = -100


def plain(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def ours(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    return lowtide.linear_cross_entropy(hidden, weight, labels, kernel="torch")


def ours_in_chunks(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    return lowtide.linear_cross_entropy(hidden, weight, labels, kernel="torch", tokens=CHUNK)


def liger(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    module = peers.load("liger_kernel.ops.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)[0]


def deepspeed(reduction: str) -> Loss:
    """A mean over shards is one of means; where labels are ignored, its documentation advises a sum and a division."""

    def loss(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
        tiled = peers.load("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledFusedLogitsLoss
        head = nn.Linear(1, 1, bias=False)
        head.weight = weight

        def of_a_shard(head: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(head(x).flatten(0, -2).float(), y.flatten(), reduction=reduction)

        total = tiled.apply(of_a_shard, head, hidden[None], labels[None], None, TOKENS // CHUNK, [weight], reduction)
        return total if reduction == "mean" else total / (labels != IGNORED).sum()

    return loss


def unsloth(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    fused = peers.load("unsloth_zoo.fused_losses.cross_entropy_loss").unsloth_fused_ce_loss
    return fused(None, hidden[None], weight, None, labels[None], shift_labels=False, torch_compile=False)


def unsloth_in_chunks(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    fused = peers.load("unsloth_zoo.fused_losses.cross_entropy_loss").unsloth_fused_ce_loss
    chunks = {"n_chunks": TOKENS // CHUNK}
    return fused(None, hidden[None], weight, None, labels[None], shift_labels=False, torch_compile=False, **chunks)


LOSSES: dict[str, Loss] = {
    "plain": plain,
    "Lowtide": ours,
    "Lowtide, Liger's chunks": ours_in_chunks,
    "Liger FLCE": liger,
    "DeepSpeed TiledFusedLogitsLoss, mean": deepspeed("mean"),
    "DeepSpeed TiledFusedLogitsLoss, sum": deepspeed("sum"),
    "unsloth_zoo fused loss": unsloth,
    "unsloth_zoo fused loss, Liger's chunks": unsloth_in_chunks,
}
UNTIMED = ("Liger FLCE",)
UNSTEADY = ("unsloth_zoo fused loss, Liger's chunks",)
"""Its peak came out a buffer higher or lower from run to run."""
RIVALRIES = (
    Rivalry(
        ours="Lowtide, Liger's chunks",
        theirs=("Liger FLCE", "DeepSpeed TiledFusedLogitsLoss, mean", "unsloth_zoo fused loss, Liger's chunks"),
        figures=("peak", "products", "time"),
    ),
    Rivalry(ours="Lowtide", theirs=("plain", "unsloth_zoo fused loss"), figures=("peak", "products", "time")),
)


def problem(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, nn.Parameter, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype).to(device).requires_grad_()
    weight = nn.Parameter((0.1 * torch.randn(CLASSES, WIDTH, dtype=dtype)).to(device))
    return hidden, weight, torch.randint(0, CLASSES, (TOKENS,)).to(device)


def bytes_and_flops(name: str) -> tuple[int, float]:
    hidden, weight, labels = problem(torch.bfloat16, "sim")
    simdevice.reset()
    base = simdevice.stats().live_bytes
    LOSSES[name](hidden, weight, labels).backward()
    torch.accelerator.synchronize()
    stats = simdevice.stats()
    return stats.peak_bytes - base - hidden.nbytes - weight.nbytes, stats.flops


def gradients(loss: Loss, *, scale: float = 1, ignored: int = 0) -> list[torch.Tensor]:
    hidden, weight, labels = problem(torch.float32, "sim")
    labels[:ignored] = IGNORED
    (scale * loss(hidden, weight, labels)).backward()
    return [hidden.grad.cpu(), weight.grad.cpu()]


CASES = {"mean": {}, "scaled": {"scale": 3.0}, "ignored": {"ignored": TOKENS // 3}}


def judged(name: str, options: dict[str, float]) -> str:
    expected = gradients(plain, **options)
    try:
        got = gradients(LOSSES[name], **options)
    except Exception as error:  # noqa: BLE001  (whatever a peer raises is the result)
        return f"raises {type(error).__name__}"
    close = [bool((one - plain).norm() <= ACCURACY * plain.norm()) for one, plain in zip(got, expected, strict=True)]
    return "right" if all(close) else "wrong"


def counts(name: str) -> dict[str, Figure]:
    simdevice.enable(memory="8GiB")
    peak, flops = bytes_and_flops(name)
    return {
        "peak": measured(peak, "bytes") if name in UNSTEADY else count(peak, "bytes"),
        "products": count(flops / (2 * TOKENS * WIDTH * CLASSES)),
    } | {case: verdict(judged(name, options)) for case, options in CASES.items()}


def times(names: tuple[str, ...]) -> dict[str, Figure]:
    hidden, weight, labels = problem(torch.float32, "cpu")

    def step(name: str) -> Callable[[], None]:
        return lambda: LOSSES[name](hidden, weight, labels).backward()

    return interleaved({name: step(name) for name in names}, against="plain", rounds=ROUNDS)


def measure(say: Say, *, only: tuple[str, ...] = tuple(LOSSES), timed: bool = True) -> Result:
    torch.set_num_threads(1)
    rows, left_out = keep_going({name: functools.partial(apart, counts, name) for name in only}, say)
    if timed:
        say("time", len(only), len(only) + 1)
        for name, figure in apart(times, tuple(name for name in rows if name not in UNTIMED)).items():
            rows[name]["time"] = figure
    setting = {"tokens": TOKENS, "width": WIDTH, "classes": CLASSES, "chunk": CHUNK, "sums": 4 * WIDTH * CLASSES}
    return Result(setting, rows, left_out)
