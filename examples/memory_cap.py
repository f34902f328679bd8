"""Fine-tune a small Llama with LoRA on the emulated accelerator, under a memory cap that plain training exceeds.

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

import lowtide
from lowtide import simdevice
from lowtide.units import format_bytes

LAYERS, TOKENS, STEPS = 16, 1024, 3
console = Console()


@dataclasses.dataclass
class Outcome:
    """How one way of training went."""

    losses: list[float]
    peak_bytes: int
    seconds: float
    error: str = ""


def build_model() -> torch.nn.Module:
    """A Llama with random weights and LoRA on top: nothing is downloaded."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    lora = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(config), lora).train()


def train(model: torch.nn.Module, title: str) -> Outcome:
    """A few AdamW steps on the device; an out-of-memory error ends it."""
    model.to("sim")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    torch.manual_seed(1)
    tokens = torch.randint(0, 256, (1, TOKENS)).to("sim")
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


def plain() -> torch.nn.Module:
    """The model as it is."""
    return build_model()


def torch_checkpoint() -> torch.nn.Module:
    """transformers' own switch, which calls torch's checkpoint."""
    model = build_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_lowtide() -> torch.nn.Module:
    """Blocks are recomputed, and their inputs wait in pinned host memory."""
    model = build_model()
    lowtide.apply(model, "recompute+offload")
    return model


WAYS = {"plain": plain, "torch checkpoint": torch_checkpoint, "lowtide recompute+offload": with_lowtide}


def main() -> None:
    """Measure each way without a cap, then set a cap that plain training exceeds, and train again."""
    warnings.simplefilter("ignore")
    with console.status("Preparing the emulated device (compiled once per torch version, about a minute)"):
        simdevice.enable(memory="2GiB")
    needs = {name: train(build(), f"measuring {name}").peak_bytes for name, build in WAYS.items()}

    cap = (needs["plain"] + needs["torch checkpoint"]) // 2
    simdevice.enable(memory=cap)
    console.print(
        f"A Llama of {LAYERS} layers with LoRA, {TOKENS} tokens, on a device of [bold]{format_bytes(cap)}[/]:"
    )
    outcomes = {name: train(build(), name) for name, build in WAYS.items()}

    table = Table("training", "needs", "fits?", "first and last loss", "virtual time")
    table.columns[0].no_wrap = True
    for name, outcome in outcomes.items():
        fits = "[red]no[/]" if outcome.error else "[green]yes[/]"
        losses = f"{outcome.losses[0]:.2f} {outcome.losses[-1]:.2f}" if outcome.losses else "-"
        time = f"{outcome.seconds * 1e3:.1f} ms" if not outcome.error else "-"
        table.add_row(name, format_bytes(needs[name]), fits, losses, time)
    console.print(table)
    console.print(f"[dim]plain: {outcomes['plain'].error}[/]")
    console.print(f"Broken rules (races, early frees): {len(simdevice.violations())}")
    fitted = [not outcome.error for outcome in outcomes.values()]
    if fitted != [False, True, True] or simdevice.violations():
        raise SystemExit("the demo did not go as it should: plain training must not fit, the others must")


if __name__ == "__main__":
    main()
