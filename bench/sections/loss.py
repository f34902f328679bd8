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
counted on the emulated device, beyond hidden states, weight and their gradients; matrix products are counted by
their FLOPs. Liger's own rule makes its chunks {chunk} tokens here. Lowtide uses the same size in one row, and its
default in the other, which is chosen by bytes and is one tile at this size. Lowtide and TRL sum the weight's
gradient in fp32, which takes {sums} here; torch (with the options that it chooses itself on an unknown accelerator),
DeepSpeed's TiledFusedLogitsLoss and unsloth_zoo sum in bf16. DeepSpeed's vocab_parallel_linear_cross_entropy (on one
rank, with the same chunks) computes the logits a second time in backward, class by class, so that it needs no such
sum; its chunked_cross_entropy takes whole logits. TRL's head computes them twice, too, in tiles of 4,096 tokens and
8,192 classes, which is one tile here. Time is measured for forward and backward in fp32 on the CPU, interleaved, and
divided by the plain loss's. Liger's kernels run on Triton's interpreter here, so they have counts and no time, as
have the rows of linear_log_probs and of frozen heads; TRL's run without Triton here, by torch's operators;
unsloth_zoo's are made to be compiled, and run eagerly here. The weight's gradient in bf16 is compared with the one
in fp64 from the same numbers. Verdicts are for fp32: for the plain case, with the loss scaled before backward, and
with the first third of the labels ignored. linear_log_probs has a gradient for each token, so it computes logits
twice. The last rows are under a head that is not trained, which needs no sum."""
COLUMNS = {
    "peak": "peak bytes",
    "products": "matrix products",
    "error": "weight's gradient off, %",
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


def torchs(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    return F.linear_cross_entropy(hidden, weight, labels, options=nn.LinearCrossEntropyOptions())


def torchs_in_chunks(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    options = nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=CHUNK)
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def log_probs(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    """What reinforcement learning asks for, as a loss: log-probabilities of tokens, with a gradient for each."""
    chosen = lowtide.linear_log_probs(hidden, weight, labels, kernel="torch")
    return -chosen.sum() / (labels != IGNORED).sum()


def log_probs_in_chunks(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    chosen = lowtide.linear_log_probs(hidden, weight, labels, kernel="torch", tile=CHUNK)
    return -chosen.sum() / (labels != IGNORED).sum()


def frozen(loss: Loss) -> Loss:
    """The loss under a head that is not trained, as with adapters."""
    return lambda hidden, weight, labels: loss(hidden, weight.detach(), labels)


def trl(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    """The head of TRL's trainers, with its tiles: all tokens up to 4,096, and 8,192 classes, as its trainers do."""
    kernel = peers.load("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    valid = labels != IGNORED
    log_probs, *_ = kernel.apply(hidden, weight, None, labels.clamp(min=0), 1.0, 8192, None, 1.0, ())
    return -log_probs.masked_fill(~valid, 0).sum() / valid.sum()


def deepspeed_linear(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    module = peers.load("deepspeed.sequence.linear_cross_entropy")
    return module.vocab_parallel_linear_cross_entropy(hidden[None], weight, labels[None], chunk_size=CHUNK)


def deepspeed_chunked(hidden: torch.Tensor, weight: nn.Parameter, labels: torch.Tensor) -> torch.Tensor:
    module = peers.load("deepspeed.runtime.chunked_cross_entropy")
    return module.chunked_cross_entropy(F.linear(hidden, weight), labels, backend="torch", block_rows=CHUNK)


LOSSES: dict[str, Loss] = {
    "plain": plain,
    "Lowtide": ours,
    "Lowtide, Liger's chunks": ours_in_chunks,
    "torch F.linear_cross_entropy": torchs,
    "torch F.linear_cross_entropy, Liger's chunks": torchs_in_chunks,
    "Lowtide linear_log_probs": log_probs,
    "Lowtide linear_log_probs, Liger's chunks": log_probs_in_chunks,
    "TRL's head": trl,
    "Liger FLCE": liger,
    "DeepSpeed TiledFusedLogitsLoss, mean": deepspeed("mean"),
    "DeepSpeed TiledFusedLogitsLoss, sum": deepspeed("sum"),
    "DeepSpeed vocab_parallel_linear_cross_entropy": deepspeed_linear,
    "DeepSpeed chunked_cross_entropy": deepspeed_chunked,
    "unsloth_zoo fused loss": unsloth,
    "unsloth_zoo fused loss, Liger's chunks": unsloth_in_chunks,
    "plain, frozen head": frozen(plain),
    "Lowtide, Liger's chunks, frozen head": frozen(ours_in_chunks),
    "torch F.linear_cross_entropy, Liger's chunks, frozen head": frozen(torchs_in_chunks),
}
UNTIMED = ("Liger FLCE", *(name for name in LOSSES if "frozen" in name or "linear_log_probs" in name))
UNSTEADY = ("unsloth_zoo fused loss, Liger's chunks",)
"""Its peak came out a buffer higher or lower from run to run."""
RIVALRIES = (
    Rivalry(
        ours="Lowtide, Liger's chunks",
        theirs=(
            "Liger FLCE",
            "torch F.linear_cross_entropy, Liger's chunks",
            "DeepSpeed TiledFusedLogitsLoss, mean",
            "DeepSpeed vocab_parallel_linear_cross_entropy",
            "unsloth_zoo fused loss, Liger's chunks",
        ),
        figures=("peak", "products", "time"),
    ),
    Rivalry(
        ours="Lowtide",
        theirs=(
            "plain",
            "torch F.linear_cross_entropy",
            "TRL's head",
            "DeepSpeed chunked_cross_entropy",
            "unsloth_zoo fused loss",
        ),
        figures=("peak", "products", "time"),
    ),
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
    gradients = sum(tensor.nbytes for tensor in (hidden, weight) if tensor.grad is not None)
    return stats.peak_bytes - base - gradients, stats.flops


def gradients(loss: Loss, *, scale: float = 1, ignored: int = 0) -> list[torch.Tensor]:
    hidden, weight, labels = problem(torch.float32, "sim")
    labels[:ignored] = IGNORED
    (scale * loss(hidden, weight, labels)).backward()
    return [tensor.grad.cpu() for tensor in (hidden, weight) if tensor.grad is not None]


CASES = {"mean": {}, "scaled": {"scale": 3.0}, "ignored": {"ignored": TOKENS // 3}}


def judged(name: str, options: dict[str, float]) -> str:
    expected = gradients(plain, **options)
    try:
        got = gradients(LOSSES[name], **options)
    except Exception as error:  # noqa: BLE001  (whatever a peer raises is the result)
        return f"raises {type(error).__name__}"
    trained = expected[: len(got)]  # a frozen head has no gradient
    close = [bool((one - plain).norm() <= ACCURACY * plain.norm()) for one, plain in zip(got, trained, strict=True)]
    return "right" if all(close) else "wrong"


def error_in_bf16(name: str) -> float:
    """How far the weight's gradient is from one in double precision, in percent of its norm."""
    hidden, weight, labels = problem(torch.bfloat16, "sim")
    LOSSES[name](hidden, weight, labels).backward()
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in (hidden, weight)]
    F.cross_entropy(F.linear(*exact), labels.cpu()).backward()
    return float(100 * (weight.grad.cpu().double() - exact[1].grad).norm() / exact[1].grad.norm())


def counts(name: str) -> dict[str, Figure]:
    simdevice.enable(memory="8GiB")
    peak, flops = bytes_and_flops(name)
    return {
        "peak": measured(peak, "bytes") if name in UNSTEADY else count(peak, "bytes"),
        "products": count(flops / (2 * TOKENS * WIDTH * CLASSES)),
        **({} if "frozen" in name else {"error": measured(round(error_in_bf16(name), 2), "%")}),
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
