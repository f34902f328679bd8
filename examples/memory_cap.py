"""Train a small Llama on the emulated accelerator, with a memory cap that plain training does not meet.

Run it with `make demo`. No GPU is needed: the device is emulated, its memory cap and its clock are exact, and the
arithmetic is the CPU's. Everything printed below is measured in this run.
"""

from __future__ import annotations

import dataclasses
import warnings

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lowtide import simdevice
from lowtide.units import format_bytes

LAYERS, TOKENS, STEPS = 8, 512, 4
console = Console()


@dataclasses.dataclass
class Outcome:
    """How one way of training went."""

    losses: list[float]
    peak_bytes: int
    seconds: float
    error: str = ""


def build_model() -> torch.nn.Module:
    """A Llama with random weights: nothing is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def train(model: torch.nn.Module, title: str) -> Outcome:
    """A few AdamW steps on the device; an out-of-memory error ends it."""
    model.to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1)
    tokens = torch.randint(0, 1024, (1, TOKENS)).to("sim")
    simdevice.reset()
    losses: list[float] = []
    error = ""
    try:
        for _ in track(range(STEPS), description=title, console=console, transient=True):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    except torch.OutOfMemoryError as out_of_memory:
        error = str(out_of_memory)
    stats = simdevice.stats()
    return Outcome(losses, stats.peak_bytes, stats.time, error)


def main() -> None:
    """Measure both ways without a cap, then set a cap between their peaks and train again."""
    warnings.simplefilter("ignore")
    with console.status("Preparing the emulated device (compiled once per torch version, about a minute)"):
        simdevice.enable(memory="2GiB")
    need_plain = train(build_model(), "measuring plain training").peak_bytes
    checkpointed = build_model()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    need_checkpointed = train(checkpointed, "measuring checkpointed training").peak_bytes

    cap = (need_plain + need_checkpointed) // 2
    simdevice.enable(memory=cap)
    console.print(
        f"A Llama of {LAYERS} layers, {TOKENS} tokens, on a device with [bold]{format_bytes(cap)}[/] of memory:"
    )

    plain = train(build_model(), "plain training")
    checkpointed = build_model()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed = train(checkpointed, "with torch's checkpoint")

    table = Table("training", "needs", "fits?", "loss over the steps", "virtual time")
    for name, need, outcome in (("plain", need_plain, plain), ("torch checkpoint", need_checkpointed, recomputed)):
        fits = "[red]out of memory[/]" if outcome.error else "[green]yes[/]"
        losses = " ".join(f"{loss:.2f}" for loss in outcome.losses) or "-"
        time = f"{outcome.seconds * 1e3:.1f} ms" if not outcome.error else "-"
        table.add_row(name, format_bytes(need), fits, losses, time)
    console.print(table)
    console.print(f"[dim]{plain.error}[/]")
    console.print(f"Broken rules (races, early frees): {len(simdevice.violations())}")
    if not plain.error or recomputed.error or simdevice.violations():
        raise SystemExit("the demo did not go as it should: plain training must not fit, checkpointing must")


if __name__ == "__main__":
    main()
