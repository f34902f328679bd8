"""Models training engines: what they do to weights, gradients and the optimizer's states, in bytes and in traffic.

DDP keeps all of them on every rank, and a second copy of the gradients in its buckets. ZeRO-1 shards the optimizer's
states, and ZeRO-2 the gradients too. FSDP2 and ZeRO-3 shard the weights as well: `fsdp2` and `zero3` model them.

Traffic has its own stream beside compute. A region's gradients are sent when its backward is over, each once, and the
optimizer waits for the last of them. DDP sums them on all ranks (two rounds); where the optimizer's states are sharded,
each rank gets its share (one round), and ZeRO-1 and -2 gather the new weights after the optimizer's step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import parameters_of, storage_key
from lowtide.regions import find_regions
from lowtide.simulation.clock import Stream
from lowtide.simulation.optimizers import Optimizers
from lowtide.targets.models import is_packed

if TYPE_CHECKING:
    from torch import nn

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.simulation.ledger import Ledger
    from lowtide.targets.job import Job


PACKED_4BIT = 0.5
"""Bytes per quantized weight: what an engine that shards weights divides and gathers."""
SCALES_OF_4BIT = 4 / 64
"""Bytes per quantized weight of its scales: a float32 number for every 64 weights, which every rank has whole."""
DOUBLE_QUANTIZED_SCALES = 1 / 64 + 4 / (64 * 256)
"""The same with double quantization: a byte for every 64 weights, and a float32 number for every 256 of these bytes."""


class Parallel:
    """One rank's share of the model under the job's engine. The region tracker tells it where the step is."""

    _masters_are_weights = False
    """Whether float32 masters are the only form in which the engine keeps trained weights."""
    _copies_masters = False
    """Whether the optimizer works on copies of the weights even where those have the same type."""
    _has_gradient_partition = False
    """Whether reduced gradients lie in a buffer that is always there."""

    def __init__(self, model: nn.Module, job: Job, ledger: Ledger, accelerator: Accelerator | None) -> None:
        self._model = model
        self._job = job
        self._ledger = ledger
        self._network = accelerator.rate_among(job.ranks) if accelerator else math.inf
        self._traffic = Stream(ledger.clock)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        regions = find_regions(model)
        self._parameters = {region.name: list(region.module.parameters()) for region in regions}
        inside = {id(parameter) for parameters in self._parameters.values() for parameter in parameters}
        self._outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        self._order = [region.name for region in regions]
        self._shares: list[torch.nn.Parameter] = []
        self._sent: set[int] = set()
        self._hooks: list[Any] = []

    def split_outside(self) -> tuple[list[Any], list[Any]]:
        """Return the weights that come before the first region and those after it, in the model's order."""
        outside = {id(parameter) for parameter in self._outside}
        order = [id(parameter) for parameter in self._model.parameters()]
        first = next((place for place, number in enumerate(order) if number not in outside), len(order))
        early = set(order[:first])
        before = [parameter for parameter in self._outside if id(parameter) in early]
        return before, [parameter for parameter in self._outside if id(parameter) not in early]

    def claim_weights(self) -> None:
        """Count weights in the form in which the engine keeps them."""
        ranks = self._job.data_ranks if self._job.shards_weights else 1
        for name, module in self._model.named_modules():
            for parameter in parameters_of(module).values():
                if parameter is not None:
                    self._store_as(parameter, _is_quantized(name, module, parameter, self._job), ranks)
                    self._ledger.claim(parameter, "weights", self._region_of(name))
        for buffer in self._model.buffers():
            self._ledger.claim(buffer, "weights", "")
        if self._job.engine == "ddp":
            self._ledger.hold(sum(parameter.nbytes for parameter in self._trained), "communication", "")

    def _store_as(self, parameter: torch.Tensor, quantized: bool, ranks: int) -> None:
        key = storage_key(parameter.untyped_storage())
        if quantized:
            self._ledger.quantized.add(key)
            per_weight = DOUBLE_QUANTIZED_SCALES if self._job.double_quant else SCALES_OF_4BIT
            packed, scales = (math.ceil(parameter.numel() * each) for each in (PACKED_4BIT, per_weight))
            self._ledger.stored_as[key] = -(-packed // ranks) + scales
        elif ranks > 1:
            is_wide = self._masters_are_weights and self._job.masters and parameter.requires_grad
            nbytes = parameter.numel() * torch.float32.itemsize if is_wide else parameter.nbytes
            self._ledger.stored_as[key] = -(-nbytes // ranks)

    def _region_of(self, module: str) -> str:
        return next((region for region in self._order if module == region or module.startswith(f"{region}.")), "")

    def make_optimizer(self) -> Optimizers:
        """Make the optimizer over this rank's share, with its states in place."""
        self._ledger.phase = "optimizer"
        with self._ledger:
            hidden = frozenset(id(p) for parameters in self._parameters.values() for p in parameters)
            self._optimizers = Optimizers(self._optimized_parameters(), self._job, self._ledger, hidden)
        if self._job.optimizer_in_backward and not self._job.shards_gradients:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda done: self._reduce([done])
                )
                for parameter in self._trained
            ]
        return self._optimizers

    def make_gradients(self) -> None:
        """Let gradients of earlier batches be there before the step begins."""
        with self._ledger:
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
                self._ledger.claim(parameter.grad, "gradients", "")

    def _optimized_parameters(self) -> list[torch.nn.Parameter]:
        """Return what the optimizer works on: the weights, their shards, or float32 masters of either."""
        if not self._job.shards_optimizer and not self._job.masters:
            return self._trained
        ranks = self._job.data_ranks if self._job.shards_optimizer else 1
        for parameter in self._trained:
            dtype = torch.float32 if self._job.masters else parameter.dtype
            share = torch.empty(-(-parameter.numel() // ranks), dtype=dtype, device=parameter.device)
            if self._masters_are_weights or (dtype is parameter.dtype and not self._copies_masters):
                self._ledger.exclude(share)  # the weights' own memory, or a part of it
            self._shares.append(torch.nn.Parameter(share))
        return self._shares

    def remove_hooks(self) -> None:
        """Take the hooks off the weights."""
        for hook in self._hooks:
            hook.remove()

    @property
    def steps_in_backward(self) -> bool:
        """Return whether the optimizer's step is over when backward is."""
        return self._job.optimizer_in_backward

    def begin_forward(self) -> None:
        """Prepare the weights outside all regions."""

    def begin_backward(self) -> None:
        """Free what was only there for forward."""

    def enter(self, name: str, phase: str) -> None:
        """Prepare the weights of a region that is about to run."""

    def leave(self, name: str, phase: str) -> None:
        """Reduce the gradients of a region whose backward is over."""
        if phase == "backward":
            self._reduce(self._parameters[name])

    def end_backward(self) -> None:
        """Reduce the remaining gradients, and let compute wait for all traffic."""
        self._reduce(self._trained)
        self._ledger.clock.compute.wait_stream(self._traffic)

    def step_optimizer(self, optimizers: Optimizers) -> None:
        """Take the optimizer's step after backward."""
        optimizers.step_after_backward()

    def end_step(self) -> None:
        """Free the gradients after the optimizer's step; ranks that hold whole weights exchange the new ones."""
        for parameter in (*self._trained, *self._shares):
            parameter.grad = None
        if self._job.shards_optimizer and not self._job.shards_weights:
            self._send(sum(parameter.nbytes for parameter in self._trained))
            self._ledger.clock.compute.wait_stream(self._traffic)

    def gathered_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of a whole weight as it is gathered: a quantized one stays packed."""
        is_packed = storage_key(parameter.untyped_storage()) in self._ledger.quantized
        return math.ceil(parameter.numel() * PACKED_4BIT) if is_packed else parameter.nbytes

    def _reduce(self, parameters: list[Any]) -> None:
        """Sum gradients over the ranks, and hand the optimizer its share of them."""
        done = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in done:
            self._ledger.claim(parameter.grad, "gradients")
        if self._job.data_ranks > 1:
            new = [parameter for parameter in done if id(parameter) not in self._sent]
            self._sent.update(map(id, new))
            self._send(sum(parameter.grad.nbytes for parameter in new), 1 if self._job.shards_optimizer else 2)
        optimized = self._hand_to_optimizer(done) if self._shares else done
        if self._job.optimizer_in_backward:
            self._optimizers.step_in_backward(optimized)
            for parameter in done:
                parameter.grad = None

    def _send(self, nbytes: int, rounds: int = 1) -> None:
        """Put traffic on its stream.

        A gather or a reduce-scatter is one round of all but a rank's own share; an all-reduce is both.
        """
        if nbytes:
            seconds = rounds * nbytes * (1 - 1 / self._job.data_ranks) / self._network
            self._traffic.time = max(self._traffic.time, self._ledger.clock.compute.time) + seconds

    def _hand_to_optimizer(self, parameters: list[Any]) -> list[torch.nn.Parameter]:
        """Give the gradients to what the optimizer works on, and return that."""
        share_of = {id(parameter): share for parameter, share in zip(self._trained, self._shares, strict=True)}
        for parameter in parameters:
            share = share_of[id(parameter)]
            if share.grad is None:
                share.grad = torch.empty_like(share)
                is_same = share.dtype is parameter.dtype and not self._job.shards_gradients
                if is_same or self._has_gradient_partition:
                    self._ledger.exclude(share.grad)
                self._ledger.claim(share.grad, "gradients")
            if self._job.shards_gradients:
                parameter.grad = None
        return [share_of[id(parameter)] for parameter in parameters]


def _is_quantized(name: str, module: nn.Module, parameter: torch.Tensor, job: Job) -> bool:
    """Return whether bitsandbytes quantizes a weight: those of linear layers, but not the head's, nor adapters'."""
    if job.base != "4bit" or parameter.requires_grad or parameter.dim() != 2:  # noqa: PLR2004
        return False
    return is_packed(name, module)
