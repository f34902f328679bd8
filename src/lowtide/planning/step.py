"""One simulated training step: the real model, the real engine, no numbers.

Everything on the simulated device is a tensor of torch's meta device: it has a shape and no memory. The optimizer's
states exist before the step begins, as in every step of a training run but the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lowtide.applying import apply
from lowtide.errors import NoRegionError, PlanError
from lowtide.planning.blank import DEVICE, Attention, Clock, Ledger, simulated_device
from lowtide.planning.parallel import Parallel
from lowtide.planning.watch import Watch
from lowtide.recording.operations import tensors_in
from lowtide.regions import find_head, find_regions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from lowtide.planning.accelerators import Accelerator
    from lowtide.planning.job import Job
    from lowtide.policy import Policy
    from lowtide.recording import Event

    MakeBatch = Callable[[nn.Module, torch.device], Any]
    """Gives what the model is called with: keywords, arguments, or one argument."""


@dataclasses.dataclass
class Recording:
    """What a simulated step did."""

    events: list[Event]
    start: int
    """The first event of the step itself; what is before it was there already."""
    seconds: float
    busy: dict[str, float]
    """Seconds of work by kind of kernel and by direction of the link."""
    kernels: dict[str, int]
    """Attention kernels that were picked."""
    operations: int
    stored_bytes: int
    """The most bytes that the offload store held."""
    packed: dict[str, int]
    """Bytes that each region handed to the store."""
    block_seconds: dict[str, dict[str, float]]
    """Seconds of compute by phase and region."""


def simulate(model: nn.Module, make_batch: MakeBatch, job: Job, policy: Policy, accelerator: Accelerator) -> Recording:
    """One step of `model` (built on meta) under `policy`."""
    clock = Clock(link_bytes_per_second=accelerator.link_rate)
    attention = Attention(job.attention, has_flash=accelerator.has_flash)
    ledger = Ledger(clock, accelerator.rates, DEVICE)
    with simulated_device(clock, attention):
        model.to(DEVICE)
        return record(model, make_batch, job, policy, ledger, attention, accelerator)


def record(
    model: nn.Module,
    make_batch: MakeBatch,
    job: Job,
    policy: Policy,
    ledger: Ledger,
    attention: Attention,
    accelerator: Accelerator | None = None,
) -> Recording:
    """The step itself, inside a simulated device."""
    model.train()
    parallel = Parallel(model, job, ledger, accelerator)
    parallel.claim_weights()
    with ledger:
        batch = make_batch(model, ledger.device)
    optimizer = parallel.make_optimizer()
    applied = apply(model, policy)
    watch = Watch(ledger, find_regions(model), parallel)
    ledger.logits_width = _logits_width(model)
    with contextlib.ExitStack() as stack:
        stack.callback(applied.remove)
        stack.enter_context(watch)
        stack.enter_context(ledger)
        ledger.clock.synchronize()
        start, began = len(ledger.events), ledger.clock.compute.time
        for tensor in tensors_in(tree_leaves(batch)):
            ledger.claim(tensor, "batch", "")
        _train(model, batch, watch, parallel, optimizer)
        ended = ledger.clock.synchronize()
        report = applied.report()
    return Recording(
        events=ledger.events,
        start=start,
        seconds=ended - began,
        busy=dict(ledger.clock.busy),
        kernels=dict(attention.picked),
        operations=ledger.operations,
        stored_bytes=report.peak_host_bytes,
        packed={region.name: region.packed_bytes for region in report.regions},
        block_seconds=watch.seconds,
    )


def _train(model: nn.Module, batch: Any, watch: Watch, parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
    ledger = watch.ledger
    ledger.phase = "forward"
    parallel.begin_forward()
    loss = _loss(_called(model, batch))
    ledger.phase = "backward"
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    watch.end_backward()
    parallel.end_backward()
    ledger.phase = "optimizer"
    optimizer.step()
    optimizer.zero_grad()
    parallel.end_step()


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _loss(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if isinstance(output, torch.Tensor):
        loss = output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise PlanError(
            "the model returns no loss for this batch (one number: itself, `.loss`, or first in a tuple): plan a "
            "module that computes its loss"
        )
    return loss


def _logits_width(model: nn.Module) -> int:
    try:
        head = find_head(model).module
    except NoRegionError:
        return 0
    return int(getattr(head, "out_features", 0) or 0)
