"""Runs a function on several real processes, and shows every rank's traceback if one fails.

Ranks are forked from a server process that has imported torch once and has no threads, so a run costs a fraction of a
second and no rank inherits anything of the test process. They meet through a file, so there is no port to collide on.
A run that takes longer than its timeout is killed and fails: a hang is a failure.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PRELOAD = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "lowtide",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.t5.modeling_t5",
]
"""Imported once, before ranks are forked; what is not installed is left out by the server."""


class RankFailedError(AssertionError):
    """At least one rank raised, died or did not finish in time; the message holds what each had to say."""


def run_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120) -> list[Any]:
    """`[function(rank, *args) for rank in range(ranks)]`, each call in a process of its own, in one process group.

    `function` must be importable (defined at the top of a test module); its result must be picklable.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as directory:
        results: multiprocessing.Queue = context.Queue()
        meeting_point = Path(directory) / "store"
        processes = [
            context.Process(target=_rank, args=(function, args, rank, ranks, meeting_point, results), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            outcomes = _collect(results, processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = {rank: text for rank, (ok, text) in outcomes.items() if not ok}
    if failures:
        raise RankFailedError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))
    return [outcomes[rank][1] for rank in range(ranks)]


def _collect(results: Any, processes: list[Any], timeout: float) -> dict[int, tuple[bool, Any]]:
    deadline = time.monotonic() + timeout
    outcomes: dict[int, tuple[bool, Any]] = {}
    while len(outcomes) < len(processes) and time.monotonic() < deadline:
        try:
            rank, ok, value = results.get(timeout=0.2)
        except queue.Empty:
            if all(not process.is_alive() for process in processes) and results.empty():
                break
            continue
        outcomes[rank] = (ok, value)
        if not ok:
            deadline = min(deadline, time.monotonic() + 10)  # the others may be waiting for it in a collective
    for rank, process in enumerate(processes):
        state = "still running" if process.is_alive() else f"exit code {process.exitcode}"
        outcomes.setdefault(rank, (False, f"no result within {timeout} s ({state})"))
    return outcomes


def _rank(function: Any, args: Any, rank: int, ranks: int, meeting_point: Path, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
    backend = getattr(function, "backend", "gloo")
    try:
        if callable(backend):
            backend = backend()
        dist.init_process_group(backend, init_method=f"file://{meeting_point}", rank=rank, world_size=ranks)
        results.put((rank, True, function(rank, *args)))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  whatever it was, the parent shows it
        results.put((rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def with_backend(backend: str | Callable[[], str]) -> Callable[[Any], Any]:
    """Which process group a rank function wants; a callable runs in the rank before the group is made."""

    def mark(function: Any) -> Any:
        function.backend = backend
        return function

    return mark
