"""The disk tier in figures: what a real CPU training step holds, and how fast the store is beside the disk itself.

    python bench/disk.py            # everything, in a directory on a disk (default: the current one)
    python bench/disk.py --directory /scratch --tokens 8192
    python bench/disk.py --part throughput    # that alone: times want a machine with nothing else to do, bytes do not

Peak memory is the process's own (VmHWM, reset before the step), each set-up in a fresh process, with
`MALLOC_MMAP_THRESHOLD_` set before it starts: else glibc keeps freed blocks, and the peak says nothing. Times are
ratios within one run: the machine's own speed is in both. Results go to
`bench/results/disk.json`, or where `--output` says.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.stores import DiskStore
from lowtide.stores.disk import THREADS
from lowtide.stores.files import ScratchFile
from lowtide.stores.host_memory import buffer_of, page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results" / "disk.json"
MIB = 1024**2
BLOCK, BLOCKS, ROUNDS = 16 * MIB, 24, 5
LAYERS, HEADS, HIDDEN, INTERMEDIATE, VOCABULARY = 32, 7, 448, 1216, 32000
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}

PARTS = ("throughput", "steps", "step ratio")
ON_DISK, TILED = "lowtide recompute+offload(disk)", "lowtide recompute+tile"
POLICIES = {
    "plain": None,
    "torch checkpoint": "checkpoint",
    "torch checkpoint + torch.save hooks": "torch.save",
    "lowtide recompute": "recompute",
    "lowtide recompute+offload(disk)": "recompute+offload(disk={0}, tmpfs)",
    "lowtide recompute+offload(disk)+tile": "recompute+offload(disk={0}, tmpfs)+tile",
    "lowtide recompute+tile": "recompute+tile",
}


class TorchSaveHooks(torch.autograd.graph.saved_tensors_hooks):
    """Do what people write themselves: save each tensor to a separate file with torch.save, at once."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        super().__init__(self._write, self._read)

    def _write(self, tensor: torch.Tensor) -> torch.Tensor | str:
        if tensor.nbytes < MIB or isinstance(tensor, nn.Parameter):
            return tensor
        handle, path = tempfile.mkstemp(dir=self._directory)
        os.close(handle)
        torch.save(tensor, path)
        return path

    def _read(self, packed: torch.Tensor | str) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor = torch.load(packed)
        Path(packed).unlink()
        return tensor


def build() -> nn.Module:
    """A Llama of about 100M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def memory_of_process(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def one_step(model: nn.Module, ids: torch.Tensor, policy: str | None, directory: str) -> int:
    """Forward and backward, with labels. What the process holds in between."""
    if policy == "torch.save":
        for layer in model.model.layers:  # hooks around each call, as they are written by hand: inputs only
            layer.forward = _hooked(layer, directory)
    loss = model(input_ids=ids, labels=ids).loss
    gc.collect()
    held = memory_of_process("VmRSS")
    loss.backward()
    return held


def _hooked(layer: nn.Module, directory: str) -> Callable:
    plain = type(layer).forward.__get__(layer)

    def run(hidden: torch.Tensor, **kwargs: object) -> torch.Tensor:
        with TorchSaveHooks(directory):
            return checkpoint(plain, hidden, use_reentrant=False, **kwargs)

    return run


def measure_step(policy: str | None, directory: str, tokens: int) -> dict[str, float]:
    """In this process: the peak over what the model and its gradients take, and the time of a second step."""
    torch.set_num_threads(1)
    model = build()
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    if policy == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif policy not in (None, "torch.save"):
        lowtide.apply(model, policy.format(directory))
    one_step(model, ids[:, :64], policy, directory)  # gradients exist from here on, and what is lazy is loaded
    gc.collect()
    base = memory_of_process("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    held = one_step(model, ids, policy, directory)
    seconds = time.perf_counter() - start
    return {"peak_bytes": memory_of_process("VmHWM") - base, "held_bytes": held - base, "seconds": seconds}


def in_fresh_process(name: str, directory: Path, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", __file__, "--only", name]
    command += ["--directory", str(directory), "--tokens", str(tokens)]
    done = subprocess.run(command, env=os.environ | ALLOCATOR, capture_output=True, text=True, check=True)  # noqa: S603
    return json.loads(done.stdout.splitlines()[-1])


def steps(directory: Path, tokens: int, names: list[str]) -> dict[str, dict[str, float]]:
    return {name: in_fresh_process(name, directory, tokens) for name in names}


def step_ratio(directory: Path, tokens: int, rounds: int) -> float:
    """Time of a step with the disk over recompute alone: in turn on one model, the median of neighbours' ratios."""
    torch.set_num_threads(1)
    model, ids = build(), torch.randint(0, VOCABULARY, (1, tokens))

    def seconds(policy: str) -> float:
        with lowtide.apply(model, policy.format(directory)):
            one_step(model, ids[:, :64], policy, str(directory))
            start = time.perf_counter()
            one_step(model, ids, policy, str(directory))
            return time.perf_counter() - start

    pair = [POLICIES["lowtide recompute+offload(disk)"], POLICIES["lowtide recompute"]]
    times = [[seconds(policy) for policy in pair] for _ in range(rounds)]
    return statistics.median(ours / alone for ours, alone in times)


def raw_loop(directory: Path, count: int) -> tuple[float, float]:
    """Seconds to write and to read all blocks with so many threads, one buffer each and nothing else to do."""
    file = ScratchFile(directory, BLOCK * BLOCKS, tmpfs=True)
    extents = file.allocate([BLOCK] * BLOCKS)
    buffers = [page_aligned(BLOCK).fill_(1) for _ in range(count)]

    def run(call: Callable, number: int) -> None:
        for extent in extents[number::count]:
            call(extent, buffer_of(buffers[number]))

    def seconds(call: Callable) -> float:
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            list(threads.map(run, [call] * count, range(count)))
        return time.perf_counter() - start

    seconds(file.write)  # the file has its blocks from here on
    return seconds(file.write), seconds(file.read)


def through_the_store(directory: Path) -> tuple[float, float]:
    """The same blocks as tensors through a store, in the order in which a step uses them."""
    store = DiskStore(directory, tmpfs=True)
    tensors = [torch.ones(BLOCK // 4) for _ in range(3)]
    for _ in range(2):  # the first round makes the file
        held, start = [], time.perf_counter()
        for number in range(BLOCKS):
            held.append(store.put(tensors[number % 3]))
            held[-1].start()
            if number:
                held[-2].release()
        held[-1].release()
        between = time.perf_counter()
        for number in reversed(range(BLOCKS)):
            if number:
                held[number - 1].prefetch()
            held[number].get()
            held.pop()
        end = time.perf_counter()
    return between - start, end - between


def throughput(directory: Path) -> dict[str, float]:
    """Return the store's speed divided by that of raw loops, with one thread and with as many as the store; medians."""
    size, figures = BLOCK * BLOCKS / 1e9, {}
    for count in (1, THREADS):
        pairs = [(raw_loop(directory, count), through_the_store(directory)) for _ in range(ROUNDS)]
        for place, verb in enumerate(("write", "read")):
            figures[f"{verb}_over_raw_{count}"] = statistics.median(raw[place] / ours[place] for raw, ours in pairs)
            figures[f"raw_{count}_{verb}_gb_per_s"] = statistics.median(size / raw[place] for raw, _ in pairs)
    return figures


def show(results: dict) -> None:
    console = Console()
    boundary = results["boundary_bytes"]
    table = Table(f"{results['tokens']} tokens, fp32", "peak over base", "held after forward", "step, s")
    for name, row in results["steps"].items():
        figures = [f"{row[figure] / MIB:.0f} MiB" for figure in ("peak_bytes", "held_bytes")]
        table.add_row(name, *figures, f"{row['seconds']:.1f}")
    console.print(table)
    console.print(f"boundary activations: {boundary / MIB:.0f} MiB; gone after forward: {results['boundary_gone']:.1%}")
    console.print(f"step time with the disk over recompute alone: {results['step_ratio']:.3f}")
    speed = results["throughput"]
    for count in (1, THREADS):
        for verb in ("write", "read"):
            console.print(
                f"16 MiB tensors, {verb}: {speed[f'{verb}_over_raw_{count}']:.2f} of a raw loop with {count} threads "
                f"({speed[f'raw_{count}_{verb}_gb_per_s']:.2f} GB/s)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5, help="of the step-time ratio")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; the others stay as stored")
    parser.add_argument("--setup", choices=list(POLICIES), action="append", help="of the steps, only this one")
    parser.add_argument("--only", choices=list(POLICIES), help="measure one set-up in this process")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure_step(POLICIES[arguments.only], str(arguments.directory), arguments.tokens)))
        return
    results = again(arguments.output, arguments.tokens)
    for part in arguments.part or PARTS:
        load = os.getloadavg()[0]
        if part == "steps":
            results["steps"] |= steps(arguments.directory, arguments.tokens, arguments.setup or list(POLICIES))
        elif part == "throughput":
            results["throughput"] = throughput(arguments.directory)
        else:
            results["step_ratio"] = step_ratio(arguments.directory, arguments.tokens // 4, arguments.rounds)
        results["load"][part] = round(load, 1)
        arguments.output.write_text(json.dumps(with_summary(results), indent=2) + "\n")
    show(results)


def again(output: Path, tokens: int) -> dict:
    """Return the stored result, to measure parts of it again; an empty one if there is none for so many tokens."""
    stored = json.loads(output.read_text()) if output.exists() else {}
    return stored if stored.get("tokens") == tokens else {"tokens": tokens, "steps": {}, "load": {}}


def with_summary(results: dict) -> dict:
    """Return how much of the regions' inputs is gone, for the two set-ups in which nothing else hides it."""
    results["boundary_bytes"] = LAYERS * results["tokens"] * HIDDEN * 4
    held = {name: row["held_bytes"] for name, row in results["steps"].items()}
    if {TILED, f"{ON_DISK}+tile"} <= held.keys():
        results["boundary_gone"] = (held[TILED] - held[f"{ON_DISK}+tile"]) / results["boundary_bytes"]
    return results


if __name__ == "__main__":
    main()
