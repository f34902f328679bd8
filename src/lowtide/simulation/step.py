"""Simulates one training step: the real model and the real engine, without numbers.

Everything on the simulated device is a meta tensor. The optimizer's states exist before the step begins, as in every
step of a training run but the first.

`RegionTracker` tells which region runs, in forward and in backward, without putting nodes into the graph. In forward,
module hooks tell. In backward, a hook on the tensor that a region returned fires when that tensor's gradient is ready,
which is when the region's own backward begins; a hook on the tensor that the region was given fires at its end.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import pytree
from lowtide.applying import apply_policy
from lowtide.errors import NoRegionError, PlanError
from lowtide.objective import returned_loss
from lowtide.policy import Policy
from lowtide.recording import tensors_in
from lowtide.regions import find_head, find_regions
from lowtide.simulation.attention import Attention
from lowtide.simulation.chunked_head import give_chunked_head
from lowtide.simulation.clock import DEVICE, Clock
from lowtide.simulation.collectives import Group
from lowtide.simulation.context_parallel import require_ring, ring_attention
from lowtide.simulation.device import simulated_device
from lowtide.simulation.engines import make_parallel
from lowtide.simulation.ledger import Ledger
from lowtide.simulation.sequence_parallel import divided_heads, require_heads, require_whole_attention
from lowtide.simulation.tensor_parallel import divide_weights, require_divisible, require_whole_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

    from torch import nn

    from lowtide.applying.report import Report
    from lowtide.hardware.accelerators import Accelerator
    from lowtide.recording import Event
    from lowtide.regions import Region
    from lowtide.simulation.meta_tensors import MetaKernels
    from lowtide.simulation.optimizers import Optimizers
    from lowtide.simulation.parallel import Parallel
    from lowtide.targets.job import Job

    MakeBatch = Callable[[nn.Module, torch.device], Any]
    """Makes what the model is called with: keywords, arguments, or one argument."""


_PRODUCING_THREADS = 2
"""Forward's and autograd's: torch keeps a workspace for each cuBLAS handle, and a handle for each thread."""


@dataclasses.dataclass
class Recording:
    """What a simulated step did, as events and figures."""

    events: list[Event]
    start: int
    """The index of the step's first event; earlier events tell what was there already."""
    seconds: float
    busy: dict[str, float]
    """Seconds of work by kind of kernel and by direction of the link."""
    kernels: dict[str, int]
    """How often each attention kernel was chosen."""
    operations: int
    stored_bytes: int
    """The most bytes that the offload store held."""
    packed: dict[str, int]
    """Bytes that each region handed to the store."""
    kept: dict[str, int]
    """How many outputs of dear operators each region kept, by `recompute(keep=...)`."""
    region_seconds: dict[str, dict[str, float]]
    """Seconds of compute by phase and region."""
    left_alone: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Why blocks do not run in tiles as the policy says, and which."""
    runs_whole: bool = False
    """Whether every module that is to run in tiles, except the loss, was too short to be cut."""
    traffic: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Counts and bytes of what ranks that share a batch exchange, by phase and kind."""
    expandable_segments: bool = False
    """Whether the allocator's segments grow."""


def simulate(
    model: nn.Module,
    make_batch: MakeBatch,
    job: Job,
    policy: Policy,
    accelerator: Accelerator,
    kernels: MetaKernels | None = None,
) -> Recording:
    """Run one step of `model` (built on the meta device) under `policy`, and return its recording.

    `kernels` remember the results of earlier steps: what differs between two policies is the order of operations.
    """
    clock = Clock(link_bytes_per_second=accelerator.link_rate)
    attention = Attention(job.attention, has_flash=accelerator.has_flash)
    ledger = Ledger(clock, accelerator.rates, DEVICE, kernels=kernels)
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
    """Run the step itself, inside a simulated device."""
    model.train()
    with _shared_batch(model, job, policy, ledger, accelerator.network_rate if accelerator else math.inf):
        return _record_rank(model, make_batch, job, policy, ledger, attention, accelerator)


def _record_rank(
    model: nn.Module,
    make_batch: MakeBatch,
    job: Job,
    policy: Policy,
    ledger: Ledger,
    attention: Attention,
    accelerator: Accelerator | None,
) -> Recording:
    parallel = make_parallel(model, job, policy, ledger, accelerator)
    parallel.claim_weights()
    if accelerator is not None and attention.device_type == "cuda":
        for _ in range(_PRODUCING_THREADS):
            ledger.hold(accelerator.blas_workspace, "workspace", "")
    with ledger:
        batch = make_batch(model, ledger.device)
    optimizers = parallel.make_optimizer()
    if job.keep_gradients:
        parallel.make_gradients()
    if job.trainer == "trl":
        give_chunked_head(model)
    # No probe: it compares numbers, and there are none. A real run makes it once, on a few tokens.
    applied = apply_policy(model, policy, probe=False)
    tracker = RegionTracker(ledger, find_regions(model), parallel)
    ledger.logits_width = _logits_width(model)
    with contextlib.ExitStack() as stack:
        stack.callback(parallel.remove_hooks)
        stack.callback(applied.remove)
        stack.enter_context(tracker)
        stack.enter_context(ledger)
        ledger.clock.synchronize()
        start, began = len(ledger.events), ledger.clock.compute.time
        for tensor in tensors_in(pytree.tree_leaves(batch)):
            ledger.claim(tensor, "batch", "")
        _train(model, batch, ledger, tracker, parallel, optimizers, keep_output=job.keep_output)
        ended = ledger.clock.synchronize()
        events = list(ledger.events)  # what the end of the simulation frees is no part of the step
        report = applied.report()
    return Recording(
        events=events,
        start=start,
        seconds=ended - began,
        busy=dict(ledger.clock.busy),
        kernels=dict(attention.picked),
        operations=ledger.operations,
        stored_bytes=report.peak_host_bytes,
        packed={region.name: region.packed_bytes for region in report.regions},
        kept={region.name: region.kept_outputs for region in report.regions},
        region_seconds=tracker.seconds,
        left_alone=_left_alone(report),
        runs_whole=_runs_whole(model, report),
        traffic=ledger.traffic.to_dict(),
        expandable_segments=job.expandable_segments,
    )


@contextlib.contextmanager
def _shared_batch(
    model: nn.Module, job: Job, policy: Policy, ledger: Ledger, bytes_per_second: float
) -> Iterator[None]:
    """Leave a model the part that one rank has of it, and let it exchange the rest inside."""
    with contextlib.ExitStack() as stack:
        if job.tp > 1:
            require_divisible(model, job.tp)
            require_whole_head(model, policy)
            for handle in divide_weights(model, Group(job.tp, ledger, bytes_per_second)):
                stack.callback(handle.remove)
        if job.sp > 1:
            require_heads(model, job.sp)
            require_whole_attention(policy)
            stack.enter_context(divided_heads(Group(job.sp, ledger, bytes_per_second)))
        if job.cp > 1:
            require_ring(model, job.cp, job.tokens)
            require_whole_attention(policy, "cp")
            stack.enter_context(ring_attention(Group(job.cp, ledger, bytes_per_second), ledger))
        yield


def resident_bytes(model: nn.Module, job: Job, accelerator: Accelerator) -> int:
    """Return the bytes that one rank's device holds before a step begins: weights and the optimizer's states."""
    clock = Clock()
    ledger = Ledger(clock, accelerator.rates, DEVICE)
    with simulated_device(clock, Attention(job.attention)), _shared_batch(model, job, Policy(), ledger, math.inf):
        parallel = make_parallel(model, job, Policy(), ledger, accelerator)
        parallel.claim_weights()
        optimizers = parallel.make_optimizer()
        parallel.remove_hooks()
        found = sum(event.change for event in ledger.events if event.place == "device")
    del optimizers
    return found


def _runs_whole(model: nn.Module, report: Report) -> bool:
    head = find_head(model).name if report.tiles and _logits_width(model) else None
    tiles = [tiled for tiled in report.tiles if tiled.calls and tiled.name != head]
    return bool(tiles) and all(tiled.tiles == tiled.calls for tiled in tiles)


def _left_alone(report: Report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for tiled in report.tiles:
        if tiled.left_alone:
            found.setdefault(tiled.left_alone, []).append(tiled.name)
    return found


def _train(
    model: nn.Module,
    batch: Any,
    ledger: Ledger,
    tracker: RegionTracker,
    parallel: Parallel,
    optimizers: Optimizers,
    *,
    keep_output: bool,
) -> None:
    ledger.phase = "forward"
    parallel.begin_forward()
    output = _call(model, batch)
    loss = _find_loss(output)
    if not keep_output:
        del output
    ledger.phase = "backward"
    parallel.begin_backward()
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    output = None
    tracker.end_backward()
    parallel.end_backward()
    ledger.phase = "optimizer"
    if not parallel.steps_in_backward:
        parallel.step_optimizer(optimizers)
    parallel.end_step()


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _find_loss(output: Any) -> torch.Tensor:
    loss = returned_loss(output)
    if loss is None:
        raise PlanError(
            "the model returns no loss for this batch. A loss is one number: the output itself, its `.loss`, or the "
            "first of a tuple. Plan a module that computes its loss"
        )
    return loss


def _logits_width(model: nn.Module) -> int:
    try:
        head = find_head(model).module
    except NoRegionError:
        return 0
    return int(getattr(head, "out_features", 0) or 0)


class RegionTracker:
    """Hooks on the regions that tell the ledger and the simulated engine where the step is."""

    def __init__(self, ledger: Ledger, regions: list[Region], parallel: Parallel) -> None:
        self._ledger = ledger
        self._regions = regions
        self._parallel = parallel
        self._handles: list[Any] = []
        self._entered = 0.0
        self.seconds: dict[str, dict[str, float]] = collections.defaultdict(dict)
        """Seconds of compute by phase and region."""

    def __enter__(self) -> Self:
        for region in self._regions:
            name, module = region.name, region.module
            self._handles.append(module.register_forward_pre_hook(self._pre_hook(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._post_hook(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _pre_hook(self, name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._parallel.enter(name, "forward")
            self._ledger.regions.append(name)
            self._entered = self._ledger.clock.compute.time
            tensor = _first_differentiable((args, kwargs))
            if tensor is not None:
                tensor.register_hook(lambda _: self._leave_backward(name))  # type: ignore[no-untyped-call]

        return hook

    def _post_hook(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._ledger.regions.pop()
            self._add_seconds("forward", name)
            self._parallel.leave(name, "forward")
            tensor = _first_differentiable(output)
            if tensor is not None:
                tensor.register_hook(lambda _: self._enter_backward(name))  # type: ignore[no-untyped-call]

        return hook

    def _enter_backward(self, name: str) -> None:
        if self._ledger.regions[-1] != name:
            if self._ledger.regions[-1]:
                self._leave_backward(self._ledger.regions[-1])
            self._ledger.regions[:] = [name]
            self._entered = self._ledger.clock.compute.time
            self._parallel.enter(name, "backward")

    def _leave_backward(self, name: str) -> None:
        if self._ledger.regions[-1] == name:
            self._ledger.regions[:] = [""]
            self._add_seconds("backward", name)
            self._parallel.leave(name, "backward")

    def end_backward(self) -> None:
        """End the region that still runs: with frozen embeddings, the first region has no input to tell of its end."""
        if self._ledger.regions[-1]:
            self._leave_backward(self._ledger.regions[-1])

    def _add_seconds(self, phase: str, name: str) -> None:
        so_far = self.seconds[phase].get(name, 0.0)
        self.seconds[phase][name] = so_far + self._ledger.clock.compute.time - self._entered


def _first_differentiable(tree: Any) -> torch.Tensor | None:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return next((tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()), None)
