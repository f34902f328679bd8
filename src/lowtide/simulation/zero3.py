"""Models ZeRO-3: what DeepSpeed keeps on every rank, and which gathered weights are alive at which moment.

A rank has shards of the weights, of their masters (in float32, or copies in the weights' own type) and of the
optimizer's states. It also has a partition of the gradients for good, in the weights' type
(`grad_partitions_flat_buffer`), and a bucket into which gradients are copied before they are reduced. In the
optimizer's step the partition is joined and converted to the masters' type, a subgroup of 1e9 elements at a time.

A region's weights are gathered on a stream of their own before it runs. After it they are released, unless their next
use is less than 1e9 elements of weights away (`max_reuse_distance`). What autograd saved keeps them alive all the same:
a product saves its transposed weight, a view of the gathered buffer, for its backward. So without recompute the
gathered weights of all regions stay until backward has used them, and backward gathers them a second time.
Source: `PartitionedParameterCoordinator` and `DeepSpeedZeroOptimizer_Stage3`, in deepspeed/runtime/zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.simulation.parallel import Parallel

if TYPE_CHECKING:
    from torch import nn

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.policy import Policy
    from lowtide.simulation.ledger import Ledger, Release
    from lowtide.simulation.optimizers import Optimizers
    from lowtide.targets.job import Job

_REUSE_DISTANCE = 1_000_000_000
"""Elements: DeepSpeed's default of `stage3_max_reuse_distance`, and of `stage3_max_live_parameters`."""

_SUBGROUP = 1_000_000_000
"""Elements: DeepSpeed's default of `sub_group_size`."""

_ALL_GATHER = "all_gather"
_BEFORE, _AFTER = "", "after all regions"


class Zero3(Parallel):
    """One rank's share of a model whose weights DeepSpeed gathers module by module."""

    _copies_masters = True
    _has_gradient_partition = True

    def __init__(
        self, model: nn.Module, job: Job, policy: Policy, ledger: Ledger, accelerator: Accelerator | None
    ) -> None:
        super().__init__(model, job, ledger, accelerator)
        before, after = self.split_outside()
        self._units = {_BEFORE: before, **self._parameters, _AFTER: after}
        self._all = list(self._units)
        self._recomputed = {name for name in self._order if policy.for_region(name).recompute}
        self._gathered: dict[str, tuple[Release, float]] = {}
        self._saved: dict[str, Release] = {}
        """Gathered weights that autograd's graph keeps alive."""

    def claim_weights(self) -> None:
        super().claim_weights()
        share = -(-sum(parameter.numel() for parameter in self._trained) // self._job.data_ranks)
        width = max((parameter.itemsize for parameter in self._trained), default=0)
        self._ledger.hold(share * width, "gradients", "")
        self._ledger.hold(self._job.reduce_bucket * width, "communication", "")

    def make_gradients(self) -> None:
        """Leave the gradients in their partition, which is there in any case."""

    def begin_forward(self) -> None:
        self._gather(_BEFORE)

    def enter(self, name: str, phase: str) -> None:
        self._gather(name)
        self._ledger.clock.compute.time = max(self._ledger.clock.compute.time, self._gathered[name][1])
        if phase == "forward" and name == self._order[0]:
            self._release(_BEFORE, _BEFORE)
        if phase == "backward" and name == self._order[-1]:
            self._release(_AFTER, None)

    def leave(self, name: str, phase: str) -> None:
        if phase == "forward":
            self._release(name, name)
            if name == self._order[-1]:
                self._gather(_AFTER)
            return
        self._release(name, None)
        if name in self._saved:
            self._saved.pop(name)()
        self._reduce(self._parameters[name])

    def end_backward(self) -> None:
        for name in list(self._gathered):
            self._release(name, None)
        super().end_backward()

    def step_optimizer(self, optimizers: Optimizers) -> None:
        """Let the partition of gradients be joined and converted, a subgroup at a time, and take the step."""
        share = -(-sum(parameter.numel() for parameter in self._trained) // self._job.data_ranks)
        size = min(share, _SUBGROUP)
        width = max((parameter.itemsize for parameter in self._trained), default=0)
        widths = [width, 4] if self._job.masters else [width]
        copies = [self._ledger.hold(size * width, "optimizer", "") for width in widths]
        super().step_optimizer(optimizers)
        for release in copies:
            release()

    def _numel(self, name: str) -> int:
        return sum(parameter.numel() for parameter in self._units[name])

    def _gather(self, name: str) -> None:
        if name in self._gathered:
            return
        is_whole = self._job.data_ranks == 1  # the shard itself, as DeepSpeed's NoGatherHandle hands it out
        nbytes = 0 if is_whole else sum(parameter.nbytes for parameter in self._units[name])
        self._send(nbytes)
        held = self._ledger.hold(nbytes, "communication", name, stream=_ALL_GATHER)
        self._gathered[name] = (held, self._traffic.time)

    def _release(self, name: str, in_forward_of: str | None) -> None:
        """Release gathered weights, unless they are used again soon or the graph has them."""
        if name not in self._gathered:
            return
        if in_forward_of is not None and name != _BEFORE:
            later = self._all[self._all.index(name) + 1 :]
            if 2 * sum(map(self._numel, later)) < _REUSE_DISTANCE:
                return
            if name not in self._recomputed:
                self._saved[name] = self._gathered.pop(name)[0]
                return
        self._gathered.pop(name)[0]()
