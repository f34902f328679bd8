"""The stage `peers`: the same steps with the checkpointing and offload of other packages that are installed here.

Nothing is judged: the rows stand beside Lowtide's. Packages that patch others run in processes of their own:
`python -m lowtide.selftest.peer NAME DEVICE WORK`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import statistics
from typing import TYPE_CHECKING, Any

import lowtide
from lowtide.compat import installed_version
from lowtide.errors import LowtideError
from lowtide.selftest.bench import give_back
from lowtide.selftest.child import output_of
from lowtide.selftest.findings import Findings
from lowtide.selftest.meters import NO_PEAKS, StepMemory, seconds_of, step_memory
from lowtide.selftest.models import workload
from lowtide.selftest.record import Row, StageResult, without_paths
from lowtide.selftest.steps import PLAIN, Twin, adamw
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from lowtide.selftest.bench import Bench

OURS = ("recompute", "recompute+offload")
_TIMEOUT = 90
"""Seconds for one peer, if the stage has that many left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A way of another package to hold activations."""

    package: str
    enter: Callable[[nn.Module], AbstractContextManager[Any]]
    """Sets a model up, and returns the context that its steps run in."""
    patches: bool = False
    """Whether it changes other packages in the process."""
    devices: tuple[str, ...] | None = None
    """The types of device that it runs on; None for all."""


def _flag(model: Any) -> AbstractContextManager[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return contextlib.nullcontext()


def _trl(model: Any) -> AbstractContextManager[Any]:
    _flag(model)
    importlib.import_module("accelerate").PartialState()  # as in a trainer: its warnings go through accelerate
    offloading = importlib.import_module("trl.models.activation_offloading")
    context: AbstractContextManager[Any] = offloading.get_act_offloading_ctx_manager(model)
    return context


def _deepspeed(model: Any) -> AbstractContextManager[None]:
    checkpointing = importlib.import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
    checkpointing.configure(None, checkpoint_in_cpu=True)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpointing.checkpoint)
    return contextlib.nullcontext()


def _liger(model: Any) -> AbstractContextManager[None]:
    importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
    return _flag(model)


def _unsloth(model: Any) -> AbstractContextManager[None]:
    module = importlib.import_module("unsloth_zoo.gradient_checkpointing")
    module.patch_unsloth_smart_gradient_checkpointing(next(model.parameters()).dtype)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return contextlib.nullcontext()


PEERS = {
    "transformers' flag": Peer(package="transformers", enter=_flag),
    "transformers' flag, TRL's offload": Peer(package="trl", enter=_trl, patches=True, devices=("cuda", "xpu", "sim")),
    "DeepSpeed's CPU checkpointing": Peer(package="deepspeed", enter=_deepspeed, patches=True, devices=("cuda",)),
    "transformers' flag, Liger's kernels": Peer(
        package="liger-kernel", enter=_liger, patches=True, devices=("cuda", "xpu")
    ),
    "unsloth's checkpointing": Peer(package="unsloth-zoo", enter=_unsloth, patches=True, devices=("cuda",)),
}


def run(bench: Bench) -> StageResult:
    """Measure steps of the plain model, with Lowtide, and with each peer that is installed."""
    if not bench.counts_peaks:
        return StageResult(name="peers", why=NO_PEAKS)
    found, left_out = Findings(bench=bench), []
    for policy in (PLAIN, *OURS):
        bench.show(policy)
        name = f"Lowtide, {policy}" if policy != PLAIN else "plain"
        found.add(name, _measured_row, bench, name, _ours(bench, policy))
    for name, peer in PEERS.items():
        why = _why_not(bench, peer) or bench.limits.reached
        if why:
            left_out.append(f"{name}: {why}")
            continue
        bench.show(name)
        found.rows.append(_peer_row(bench, name, peer))
    return found.stage("peers", why="; ".join(left_out))


def _why_not(bench: Bench, peer: Peer) -> str:
    if installed_version(peer.package) is None:
        return "not installed"
    if peer.devices is not None and bench.device.type not in peer.devices:
        return f"not for {bench.device.type}"
    return "left out of a quick run" if peer.patches and bench.quick else ""


def _ours(bench: Bench, policy: str) -> Callable[[nn.Module], AbstractContextManager[Any]]:
    def enter(model: nn.Module) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if policy == PLAIN else lowtide.apply(model, bench.offload(policy))

    return enter


def _peer_row(bench: Bench, name: str, peer: Peer) -> Row:
    """Measure a peer. If it raises, that is what the row says: it is not this project's failure."""
    try:
        if peer.patches:
            gc.collect()  # the model that was measured before must not be on the device beside the child's
            give_back(bench.device)
            work = json.dumps(dataclasses.asdict(bench.work))
            arguments = ["-m", "lowtide.selftest.peer", name, bench.device.type, work]
            timeout = min(_TIMEOUT, bench.limits.seconds_left)
            memory, seconds = json.loads(output_of(arguments, timeout=timeout, folder=bench.folder))
            return _row(name, StepMemory(**memory), seconds)
        return _measured_row(bench, name, peer.enter)
    except LowtideError as error:
        return Row(name=name, verdict=None, summary=without_paths(f"did not run: {error}"))
    except Exception as error:  # noqa: BLE001  (whatever another package raises)
        return Row(name=name, verdict=None, summary=without_paths(f"raises {type(error).__name__}: {error}"))


def _measured_row(bench: Bench, name: str, enter: Callable[[nn.Module], AbstractContextManager[Any]]) -> Row:
    return _row(name, *measure(bench, enter))


def measure(bench: Bench, enter: Callable[[nn.Module], AbstractContextManager[Any]]) -> tuple[StepMemory, list[float]]:
    """Return the bytes of a step of the workload under a way to hold activations, and the seconds of several steps."""
    with _trained(bench, enter) as (twin, context):
        with context:
            twin.step()
            seconds = [seconds_of(bench, twin.step) for _ in range(bench.work.rounds)]
            memory = step_memory(bench, twin.forward, twin.finish)
        return memory, seconds


@contextlib.contextmanager
def _trained(
    bench: Bench, enter: Callable[[nn.Module], AbstractContextManager[Any]]
) -> Iterator[tuple[Twin, AbstractContextManager[Any]]]:
    model, batch = workload(bench.work, bench.device)
    context = enter(model)
    optimizer = adamw(bench, model)
    yield Twin("", model, batch, optimizer, None), context
    del model, batch, optimizer, context
    gc.collect()


def _row(name: str, memory: StepMemory, seconds: list[float]) -> Row:
    median = statistics.median(seconds)
    return Row(
        name=name,
        verdict=None,
        summary=f"{format_bytes(memory.after_forward)} after forward, {format_bytes(memory.peak)} at the peak, "
        f"{median * 1e3:.4g} ms",
        figures={"after_forward_bytes": memory.after_forward, "peak_bytes": memory.peak, "seconds": median},
    )
