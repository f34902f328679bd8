"""Tiled MLPs side by side: ours, DeepSpeed's, Liger's and unsloth's; `make bench` runs it beside the peers.

Counts first: matrix products (FLOP counter) and peak bytes (emulated device) are exact. Time is the median of
interleaved runs on the CPU, as a ratio to the untiled MLP. The matrix of cases compares gradients with the untiled
module's, and hook firings with one. The table goes to the terminal, to `bench/results/tiling.json` and to
`docs/tiling-benchmark.md`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import lowtide
from lowtide import simdevice
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    Engine = Callable[[nn.Module, torch.Tensor, int], Any]

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "tiling.json"
PAGE = HERE.parent / "docs" / "tiling-benchmark.md"
HIDDEN, INNER, TOKENS, SHARDS = 256, 896, 4096, 32
ACCURACY = 1e-9
"""Relative: the modules are in double precision, so anything larger is a fault."""


class Mlp(nn.Module):
    """Llama's, with dropout if it is asked for."""

    def __init__(
        self, hidden: int = 32, inner: int = 80, dtype: torch.dtype = torch.double, dropout: float = 0
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(F.dropout(x, self.dropout))) * self.up(x))


class Routed(nn.Module):
    """Two experts and a router whose logits are an output."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 2, dtype=torch.double)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.router(x)
        weights = logits.softmax(-1)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts)), logits


def untiled(mlp: nn.Module, x: torch.Tensor, _shards: int) -> Any:
    return mlp(x)


def ours(mlp: nn.Module, x: torch.Tensor, shards: int) -> Any:
    return lowtide.tile(mlp, x, tokens=-(-x.shape[:-1].numel() // shards))


def engines() -> dict[str, Engine]:
    """By name; a peer that is not installed is left out, and said so."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "UNSLOTH_ZOO_DISABLE_GPU_INIT": "1"}
    found: dict[str, Engine] = {"untiled": untiled, "Lowtide": ours}
    for name, load in (
        ("DeepSpeed TiledMLP", _deepspeed),
        ("Liger tiled MLP", _liger),
        ("unsloth tiled MLP", _unsloth),
    ):
        try:
            found[name] = load()
        except ImportError as error:
            Console().print(f"[yellow]{name} is left out:[/] {error}")
    return found


def _deepspeed() -> Engine:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    return lambda mlp, x, shards: TiledMLP.apply(lambda m, t: m(t), mlp, x, shards, list(mlp.parameters()))


def _liger() -> Engine:
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    return lambda mlp, x, shards: apply_tiled_mlp(lambda m, t: m(t), mlp, x, shards)


def _unsloth() -> Engine:
    from unsloth_zoo.tiled_mlp import TiledMLP

    def run(mlp: nn.Module, x: torch.Tensor, shards: int) -> Any:
        count = x.shape[:-1].numel()
        chunk = -(-count // shards)
        return TiledMLP.apply(mlp.forward, mlp, x, True, max(1, count // chunk), chunk)

    return run


# ---- counts


class Flops(TorchDispatchMode):
    """Torch's own counts per operator, without its look at modules, which trips over what peers do."""

    total = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output


def flops(engine: Engine, *, in_checkpoint: bool) -> int:
    mlp = Mlp()
    x = torch.randn(1, 320, 32, dtype=torch.double, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return engine(mlp, x, 10)

    with Flops() as counter:
        (checkpoint(run, x, use_reentrant=False) if in_checkpoint else run(x)).sum().backward()
    return counter.total


def peak_bytes(engine: Engine) -> int:
    """Of forward and backward, over weights, their gradients and the input."""
    mlp = Mlp(HIDDEN, INNER, torch.float32).to("sim")
    x = torch.randn(1, TOKENS, HIDDEN, device="sim", requires_grad=True)
    torch.accelerator.synchronize()
    simdevice.reset()
    base = simdevice.stats().live_bytes
    engine(mlp, x, SHARDS).backward(torch.ones(1, TOKENS, HIDDEN, device="sim"))
    torch.accelerator.synchronize()
    return simdevice.stats().peak_bytes - base - sum(p.nbytes for p in mlp.parameters())


def seconds(all_engines: dict[str, Engine], rounds: int = 7) -> dict[str, float]:
    """Medians of interleaved steps on the CPU."""
    mlp = Mlp(HIDDEN, INNER, torch.float32)
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    taken: dict[str, list[float]] = {name: [] for name in all_engines}
    for _ in range(rounds):
        for name, engine in all_engines.items():
            start = time.perf_counter()
            engine(mlp, x, SHARDS // 4).sum().backward()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


# ---- the matrix of cases


def gradients(engine: Engine, module: nn.Module, x: torch.Tensor, shards: int = 4) -> list[torch.Tensor | None]:
    module.zero_grad()
    x.grad = None
    torch.manual_seed(1)
    output = engine(module, x, shards)
    parts = output if isinstance(output, tuple) else (output,)
    sum(part.square().sum() for part in parts).backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def is_right(ours: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or bool((a - b).norm() <= ACCURACY * b.norm()))
        for a, b in zip(ours, expected, strict=True)
    )


def batch(*lead: int, requires_grad: bool = True) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*lead, 32, dtype=torch.double, requires_grad=requires_grad)


def like_untiled(engine: Engine, module: nn.Module, x: torch.Tensor, shards: int = 4) -> bool:
    return is_right(gradients(engine, module, x, shards), gradients(untiled, module, x, shards))


def case_dense(engine: Engine) -> bool:
    return like_untiled(engine, Mlp(), batch(1, 64))


def case_batch_of_three(engine: Engine) -> bool:
    return like_untiled(engine, Mlp(), batch(3, 21))


def case_fewer_tokens_than_tiles(engine: Engine) -> bool:
    return like_untiled(engine, Mlp(), batch(1, 9), shards=6)


def case_input_without_gradient(engine: Engine) -> bool:
    return like_untiled(engine, Mlp(), batch(1, 64, requires_grad=False))


def case_frozen_weights(engine: Engine) -> bool:
    return like_untiled(engine, Mlp().requires_grad_(False), batch(1, 64))


def case_router_logits(engine: Engine) -> bool:
    return like_untiled(engine, Routed(), batch(1, 64))


def case_dropout(engine: Engine) -> bool:
    """Against the tiles one by one with the same random numbers."""
    mlp, x = Mlp(dropout=0.3), batch(1, 64)

    def one_by_one(mlp: nn.Module, x: torch.Tensor, shards: int) -> torch.Tensor:
        return torch.cat([mlp(part) for part in x.chunk(shards, 1)], 1)

    return is_right(gradients(engine, mlp, x), gradients(one_by_one, mlp, x))


def case_hooks_fire_once(engine: Engine) -> bool:
    mlp, fired = Mlp(), []
    for parameter in mlp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    engine(mlp, batch(1, 64), 4).sum().backward()
    return len(fired) == len(list(mlp.parameters()))


def case_autograd_grad(engine: Engine) -> bool:
    mlp, x = Mlp(), batch(1, 64)
    torch.autograd.grad(engine(mlp, x, 4).sum(), x)
    return all(parameter.grad is None for parameter in mlp.parameters())


class Ddp(nn.Module):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.first, self.mlp, self.engine = nn.Linear(32, 32, dtype=torch.double), Mlp(), engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.engine(self.mlp, self.first(x), 4)


def _rank(name: str, rank: int, store: str, options: dict[str, bool], results: Any) -> None:
    """One of two processes; it knows the joined batch, and judges its own gradients."""
    try:
        torch.manual_seed(0)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        model, reference = Ddp(engines()[name]), Ddp(untiled)
        reference.load_state_dict(model.state_dict())
        batches = [torch.full((1, 64, 32), 0.1 + one, dtype=torch.double) for one in range(2)]
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(batches[rank]).square().mean().backward()
        sum(reference(one).square().mean() / 2 for one in batches).backward()
        results.put(is_right([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()]))
    except RuntimeError:
        results.put(False)
    results.close()
    results.join_thread()
    os._exit(0)


def under_ddp(name: str, options: dict[str, bool]) -> bool:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(name, rank, f"{folder}/store", options, results)) for rank in range(2)
        ]
        for process in ranks:
            process.start()
        got = [results.get(timeout=60) for _ in ranks]
        for process in ranks:
            process.join()
    return all(got)


CASES: dict[str, Callable[[Engine], bool]] = {
    "dense": case_dense,
    "batch of three": case_batch_of_three,
    "fewer tokens than tiles": case_fewer_tokens_than_tiles,
    "input without gradient": case_input_without_gradient,
    "frozen weights": case_frozen_weights,
    "router logits": case_router_logits,
    "dropout": case_dropout,
    "hooks fire once": case_hooks_fire_once,
    "autograd.grad leaves .grad alone": case_autograd_grad,
}
DDP = {
    "DDP": {},
    "DDP, find_unused_parameters": {"find_unused_parameters": True},
    "DDP, static_graph": {"static_graph": True},
}


def verdict(case: Callable[[Engine], bool], engine: Engine) -> str:
    try:
        return "right" if case(engine) else "wrong"
    except Exception as error:  # noqa: BLE001  (whatever a peer raises is the result)
        return f"raises {type(error).__name__}"


def measure(all_engines: dict[str, Engine]) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {name: {} for name in all_engines}
    for name in track(all_engines, "DDP", transient=True):  # first: these processes are forked
        for case, options in DDP.items():
            results[name][case] = "right" if under_ddp(name, options) else "fails"
    simdevice.enable(memory="8GiB")  # before the first backward of this process
    for name, engine in track(all_engines.items(), "cases", transient=True):
        results[name] |= {case: verdict(check, engine) for case, check in CASES.items()}
        results[name]["flops"] = flops(engine, in_checkpoint=False)
        results[name]["flops in a checkpoint"] = flops(engine, in_checkpoint=True)
    for name, taken in seconds(all_engines).items():
        results[name]["seconds"] = taken
    for name, engine in track(all_engines.items(), "bytes", transient=True):
        results[name]["peak bytes"] = peak_bytes(engine)
    return results


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    plain = results["untiled"]
    unit = plain["flops"] / 9
    lines = [
        ["time, ratio to untiled", *(f"{row['seconds'] / plain['seconds']:.2f}" for row in results.values())],
        ["matrix products", *(f"{row['flops'] / unit:.0f}" for row in results.values())],
        [
            "matrix products inside a checkpoint",
            *(f"{row['flops in a checkpoint'] / unit:.0f}" for row in results.values()),
        ],
        ["peak bytes", *(format_bytes(row["peak bytes"]) for row in results.values())],
    ]
    return lines + [[case, *(row[case] for row in results.values())] for case in (*CASES, *DDP)]


def page(results: dict[str, dict[str, Any]]) -> str:
    header = ["", *results]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows(results)])
    return f"""# Tiled MLPs side by side

Written by `make bench` (`bench/tiling.py`), on a CPU: the peers are the released packages, unchanged, each called as
its documentation says. Matrix products count one weight against all tokens as 1 (an untiled MLP: 3 forward, 6
backward). Peak bytes are those of {TOKENS} tokens, {HIDDEN} wide, {INNER} inside, in {SHARDS} tiles, counted on the
emulated device. Time is the median of interleaved steps with {SHARDS // 4} tiles. "Right" means: gradients within
{ACCURACY:g} of the untiled module's, in double precision.

{table}
"""


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = measure(engines())
    table = Table("", *results)
    for line in rows(results):
        table.add_row(*line)
    Console().print(table)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    sys.exit(main())
