"""Ways to hold activations, side by side on the emulated device: `make bench`.

All figures are counts or virtual time, so they are exact and the same on every machine. The model is a stack of
transformer blocks; the device is slow enough for its size that arithmetic, not launches, dominates. The table goes to
the terminal and, as JSON, to `bench/results/offload_on_sim.json`; a rerun says what changed.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import overhead
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import simdevice
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

RESULTS = Path(__file__).parent / "results" / "offload_on_sim.json"
WIDTH, HEADS, LAYERS, TOKENS = 128, 4, 12, 1024


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


def plain(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def checkpointed(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def under(hooks: Callable[[], AbstractContextManager], step: Callable) -> Callable:
    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with hooks():
            return step(layers, x)

    return run


def save_on_cpu() -> AbstractContextManager:
    return torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="sim")


def applied(policy: str) -> Callable:
    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        lowtide.apply(layers, policy)
        return plain(layers, x)

    return run


def candidates() -> dict[str, Callable]:
    """Name and step function. Peers that are not installed are left out, and said so."""
    found = {
        "plain": plain,
        "lowtide recompute": applied("recompute"),
        "lowtide recompute+offload": applied("recompute+offload"),
        "lowtide offload": applied("offload"),
        "torch checkpoint": checkpointed,
        "torch checkpoint + save_on_cpu": under(save_on_cpu, checkpointed),
        "torch save_on_cpu": under(save_on_cpu, plain),
    }
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError as error:
        Console().print(f"[yellow]TRL is left out:[/] {error}")
    else:
        found["torch checkpoint + TRL offload"] = under(OffloadActivations, checkpointed)
        found["TRL offload"] = under(OffloadActivations, plain)
    return found


def measure(step: Callable) -> dict[str, float]:
    """One training step's figures, without the step that warms it up."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Block() for _ in range(LAYERS)).to("sim")
    x = torch.randn(1, TOKENS, WIDTH).to("sim")
    for _ in range(2):
        layers.zero_grad()
        torch.accelerator.synchronize()
        base = simdevice.stats().live_bytes
        simdevice.reset()
        step(layers, x).square().mean().backward()
        torch.accelerator.synchronize()
    stats = dataclasses.asdict(simdevice.stats())
    figures = {name: stats[name] for name in ("time", "peak_pinned_bytes", "d2h_bytes", "h2d_bytes", "flops")}
    return figures | {"step_peak_bytes": stats["peak_bytes"] - base, "violations": len(simdevice.violations())}


def show(results: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> None:
    """The table, then what differs from the stored result."""
    console = Console()
    table = Table("", "step, virtual", "ratio", "peak over weights", "pinned")
    table.columns[0].no_wrap = True
    for name, row in results.items():
        table.add_row(
            name,
            f"{row['time'] * 1e3:.1f} ms",
            f"{row['time'] / results['plain']['time']:.2f}",
            format_bytes(row["step_peak_bytes"]),
            format_bytes(row["peak_pinned_bytes"]),
        )
    console.print(table)
    for name, row in results.items():
        for figure, value in row.items():
            was = before.get(name, {}).get(figure)
            if was != value:
                console.print(f"changed: {name}, {figure}: {was} -> {value}")


def main() -> None:
    warnings.simplefilter("ignore")
    simdevice.enable(memory="4GiB", flops=1e12, bandwidth=1e12, h2d=2e9, d2h=2e9, launch=1e-6)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {name: measure(step) for name, step in track(candidates().items(), "measuring", transient=True)}
    show(results, before)
    for name, value in overhead.main().items():
        Console().print(f"Python overhead on tiny layers, {name}: {value:.2f}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
