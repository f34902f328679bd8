"""Models ZeRO-3: what DeepSpeed keeps on every rank, and which gathered weights are alive at which moment.

A rank has shards of the weights, of their masters (in float32, or copies in the weights' own type) and of the
optimizer's states. It also has a partition of the gradients for good, in the weights' type
(`grad_partitions_flat_buffer`), and a bucket into which each gradient is copied as soon as it is complete; one that is
larger than the bucket waits as it is. When the next does not fit, all of them are joined in a copy and reduced. In the
optimizer's step the partition is joined and converted to the masters' type, a subgroup of 1e9 elements at a time.

A region's weights are gathered on a stream of their own before it runs, and with them up to 5e7 elements of those that
follow (`prefetch_bucket_size`), as long as less than 1e9 are gathered (`max_live_parameters`). What is gathered
together is copied out of one buffer, which lives until the last of it was used. After a region its weights are
released, unless their next use is less than 1e9 elements of weights away (`max_reuse_distance`): each region in between
counts once in forward, once in backward, and once more if it is recomputed. What autograd saved keeps them alive all
the same: a product saves its transposed weight, a view of the gathered one, for its backward. So without recompute the
gathered weights of all regions stay until backward has used them, and backward gathers them a second time.
Source: `PartitionedParameterCoordinator`, `AllGatherCoalescedHandle`, `reduce_scatter_coalesced` and
`DeepSpeedZeroOptimizer_Stage3`, in deepspeed/runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide.simulation.parallel import Parallel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from lowtide.hardware.accelerators import Accelerator
    from lowtide.policy import Policy
    from lowtide.simulation.ledger import Ledger, Release
    from lowtide.simulation.optimizers import Optimizers
    from lowtide.targets.job import Job

_REUSE_DISTANCE = _LIVE = 1_000_000_000
"""Elements: DeepSpeed's defaults of `stage3_max_reuse_distance` and of `stage3_max_live_parameters`."""

_PREFETCH = 50_000_000
"""Elements: DeepSpeed's default of `stage3_prefetch_bucket_size`."""

_SUBGROUP = 1_000_000_000
"""Elements: DeepSpeed's default of `sub_group_size`."""

_ALL_GATHER = "all_gather"
_BEFORE, _AFTER = "", "after all regions"


class _Gathered(NamedTuple):
    """Weights of a region that are whole, or on their way."""

    releases: list[Release]
    numel: int
    arrival: float


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
        self._gathered: dict[str, _Gathered] = {}
        self._ahead: dict[str, _Gathered] = {}
        """What was prefetched of regions that did not begin yet."""
        self._joint: dict[str, Release] = {}
        """Buffers out of which prefetched weights were copied, by the last region that has a part of it."""
        self._saved: dict[str, list[Release]] = {}
        """Gathered weights that autograd's graph keeps alive."""
        self._bucket: list[Any] = []
        """The parameters whose gradients were not reduced yet."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._add_to_bucket)  # type: ignore[no-untyped-call]
            for parameter in self._trained
        ]

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
        self._prefetch(self._order, "forward")

    def enter(self, name: str, phase: str) -> None:
        self._gather(name)
        clock = self._ledger.clock
        clock.compute.time = max(clock.compute.time, self._gathered[name].arrival)
        if phase == "forward" and name == self._order[0]:
            self._release(_BEFORE, _BEFORE)
        if phase == "backward" and name == self._order[-1]:
            self._release(_AFTER, None)
        place = self._all.index(name)
        self._prefetch(self._all[place + 1 :] if phase == "forward" else self._all[:place], phase)

    def leave(self, name: str, phase: str) -> None:
        if name in self._joint:
            self._joint.pop(name)()
        if phase == "forward":
            self._release(name, name)
            if name == self._order[-1]:
                self._gather(_AFTER)
                self._prefetch(self._all[:-1], "backward")
            return
        self._release(name, None)
        _free(self._saved.pop(name, []))
        if name == self._order[0]:
            self._gather(_BEFORE)  # DeepSpeed gathers for a module's backward, needed or not

    def end_backward(self) -> None:
        for name in list(self._gathered):
            self._release(name, None)
        for ahead in self._ahead.values():
            _free(ahead.releases)
        _free(self._joint.values())
        self._ahead, self._joint = {}, {}
        self._flush()
        super().end_backward()

    def _add_to_bucket(self, parameter: Any) -> None:
        """Take a complete gradient: copy it into the bucket if it is small enough, and reduce what fills it."""
        self._ledger.claim(parameter.grad, "gradients")
        size = self._job.reduce_bucket
        if self._bucket and sum(other.numel() for other in self._bucket) + parameter.numel() > size:
            self._flush()
        self._bucket.append(parameter)
        if parameter.numel() <= size:
            self._ledger.charge_copy(2 * parameter.grad.nbytes)
            self._reduce([parameter])  # whose time is counted now, and its memory given back

    def _flush(self) -> None:
        if len(self._bucket) > 1:
            nbytes = sum(parameter.nbytes for parameter in self._bucket)
            self._ledger.hold(nbytes, "communication")()
            self._ledger.charge_copy(2 * nbytes)
        self._reduce(self._bucket)
        self._bucket = []

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
        ahead = self._ahead.pop(name, _Gathered([], 0, 0.0))
        rest = max(0, self._whole_bytes(self._units[name]) - sum(release.nbytes for release in ahead.releases))
        self._send(rest)
        held = self._ledger.hold(rest, "communication", name, stream=_ALL_GATHER)
        self._gathered[name] = _Gathered([*ahead.releases, held], self._numel(name), self._traffic.time)

    def _prefetch(self, regions: list[str], phase: str) -> None:
        """Gather weights of the regions that run next, up to a number of elements; the last may exceed it."""
        turn = 1 if phase == "forward" else -1
        live = sum(gathered.numel for gathered in (*self._gathered.values(), *self._ahead.values()))
        room = min(_PREFETCH, _LIVE - live)
        together: list[Any] = []
        last = ""
        for name in regions[::turn]:
            if name in self._gathered or name in self._ahead:
                continue
            taken = []
            for parameter in self._units[name][::turn]:
                if room <= 0:
                    break
                room -= parameter.numel()
                taken.append(parameter)
            if taken:
                nbytes = self._whole_bytes(taken)
                self._send(nbytes)
                held = self._ledger.hold(nbytes, "communication", name, stream=_ALL_GATHER)
                numel = sum(parameter.numel() for parameter in taken)
                self._ahead[name] = _Gathered([held], numel, self._traffic.time)
                together += taken
                last = name
            if room <= 0:
                break
        if len(together) > 1 and last not in self._joint:
            nbytes = self._whole_bytes(together)
            self._joint[last] = self._ledger.hold(nbytes, "communication", last, stream=_ALL_GATHER)

    def _whole_bytes(self, parameters: list[Any]) -> int:
        """Return the bytes of whole weights; a single rank's shard is the whole (DeepSpeed's `NoGatherHandle`)."""
        return 0 if self._job.data_ranks == 1 else sum(parameter.nbytes for parameter in parameters)

    def _distance(self, name: str) -> int:
        """Return the elements of weights that are used between a region's forward and its next use."""
        later = self._all[self._all.index(name) + 1 :]
        return sum(self._numel(other) * (3 if other in self._recomputed else 2) for other in later)

    def _release(self, name: str, in_forward_of: str | None) -> None:
        """Release gathered weights, unless they are used again soon or the graph has them."""
        if name not in self._gathered:
            return
        if in_forward_of is not None:
            if self._distance(name) < _REUSE_DISTANCE:
                return
            if name not in self._recomputed and name != _BEFORE:  # an embedding's backward needs no weights
                self._saved[name] = self._gathered.pop(name).releases
                return
        _free(self._gathered.pop(name).releases)


def _free(releases: Iterable[Release]) -> None:
    for release in releases:
        release()
