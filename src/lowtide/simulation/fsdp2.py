"""Models FSDP2: what it gathers and reduces, in which order, and on which stream each buffer is allocated.

Weights exist as shards alone, in float32 if the job has `masters` (`MixedPrecisionPolicy(param_dtype=bfloat16)`), and
are gathered in the type of the products. Each region is a unit, and everything outside all regions is the root's, which
stays gathered until backward is over. With `units="ends"`, what comes before the regions is one unit and what comes
after them another, as in torchtitan. The unit that backward needs first stays gathered; without `reshard`, all do.

An all-gather writes into a buffer of a stream of its own, out of which compute copies the weights. In forward that
buffer lives until the next unit's copy, or the end of forward. In backward it lives until its own copy, and the next
unit is gathered ahead.
When a unit's backward is over, its gradients are copied into a buffer in the type of the reduction, which lives until
the next unit's reduction begins; what the reduction returns, the sharded gradients, is allocated on its own stream.
Source: `FSDPParamGroup.wait_for_unshard` and `.post_backward`, and `foreach_all_gather` and `foreach_reduce`, in
torch/distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.simulation.parallel import Parallel
from lowtide.targets.job import DTYPES

if TYPE_CHECKING:
    from lowtide.simulation.ledger import Release

_ROOT, _HEAD = "", "after all regions"
_ALL_GATHER, _REDUCE_SCATTER = "all_gather", "reduce_scatter"


class Fsdp2(Parallel):
    """One rank's share of a model whose blocks are FSDP2's units."""

    _masters_are_weights = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        before, after = self.split_outside() if self._job.units == "ends" else (self._outside, [])
        self._has_ends = bool(before and after)
        self._units = {**self._parameters, _ROOT: before if self._has_ends else self._outside, _HEAD: after}
        self._arrival: dict[str, float] = {}
        """When the weights of a unit that were asked for are there."""
        self._buffers: dict[str, Release] = {}
        """Results of all-gathers that were not copied out yet."""
        self._whole: dict[str, Release] = {}
        """The units whose weights are whole."""
        self._last: Release | None = None
        """The result of the last all-gather in forward."""
        self._reducing: tuple[Release, float] | None = None
        """The input of the last reduction, and when it ends."""

    def make_gradients(self) -> None:
        with self._ledger, self._ledger.on_stream(_REDUCE_SCATTER):
            for share in self._shares:
                share.grad = torch.zeros_like(share)
                self._ledger.claim(share.grad, "gradients", "")

    def begin_forward(self) -> None:
        self._unshard(_ROOT, "forward")

    def begin_backward(self) -> None:
        self._free_last()

    def enter(self, name: str, phase: str) -> None:
        if phase == "backward" and self._has_ends and name == self._order[-1]:
            self._end_unit(_HEAD)
        self._unshard(name, phase)
        if self._has_ends and self._job.reshard and phase == "forward" and name == self._order[0]:
            self._reshard(_ROOT)
        place = self._order.index(name) + (1 if phase == "forward" else -1)
        if not 0 <= place < len(self._order):
            return
        self._request(self._order[place])
        if phase == "backward":  # in forward, the host asks for the next unit when it gets there
            self._allocate(self._order[place])

    def leave(self, name: str, phase: str) -> None:
        if phase == "backward":
            self._end_unit(name)
            if self._has_ends and name == self._order[0]:
                self._unshard(_ROOT, "backward")
        elif self._job.reshard and (name != self._order[-1] or self._has_ends):
            self._reshard(name)
        if phase == "forward" and self._has_ends and name == self._order[-1]:
            self._unshard(_HEAD, "forward")  # the unit whose weights backward needs first

    def _reshard(self, name: str) -> None:
        if name in self._whole:
            self._whole.pop(name)()

    def _end_unit(self, name: str) -> None:
        """Free a unit's weights and reduce its gradients when its backward is over."""
        self._reshard(name)
        self._reduce(self._units[name])

    def end_backward(self) -> None:
        for releases in (self._whole, self._buffers):
            while releases:
                releases.popitem()[1]()
        super().end_backward()
        if self._reducing is not None:
            self._reducing[0]()
            self._reducing = None

    def _nbytes(self, name: str) -> int:
        return sum(self.gathered_bytes(parameter) for parameter in self._units[name])

    def _request(self, name: str) -> None:
        """Let the all-gather of a unit begin."""
        if name not in self._arrival and name not in self._whole:
            self._send(self._nbytes(name))
            self._arrival[name] = self._traffic.time

    def _allocate(self, name: str) -> None:
        if name not in self._buffers and name not in self._whole:
            self._buffers[name] = self._ledger.hold(self._nbytes(name), "communication", name, stream=_ALL_GATHER)

    def _unshard(self, name: str, phase: str) -> None:
        if name in self._whole:
            return
        self._request(name)
        self._allocate(name)
        clock = self._ledger.clock
        clock.compute.time = max(clock.compute.time, self._arrival.pop(name))
        self._free_last()
        self._whole[name] = self._ledger.hold(self._nbytes(name), "communication", name)
        self._ledger.charge_copy(2 * self._nbytes(name))
        if phase == "forward":
            self._last = self._buffers.pop(name)
        else:
            self._buffers.pop(name)()

    def _free_last(self) -> None:
        if self._last is not None:
            self._last()
            self._last = None

    def _reduce(self, parameters: list[Any]) -> None:
        done = [parameter for parameter in parameters if parameter.grad is not None]
        if not done:
            return
        for parameter in done:
            self._ledger.claim(parameter.grad, "gradients")
        clock = self._ledger.clock
        if self._reducing is not None:
            release, end = self._reducing
            clock.compute.time = max(clock.compute.time, end)
            release()
        nbytes = sum(parameter.numel() * self._reduce_type(parameter).itemsize for parameter in done)
        held = self._ledger.hold(nbytes, "communication")
        self._ledger.charge_copy(nbytes + sum(parameter.grad.nbytes for parameter in done))
        self._send(nbytes)
        self._reducing = (held, self._traffic.time)
        with self._ledger.on_stream(_REDUCE_SCATTER):
            if self._job.keep_gradients:  # the new shares are added to what is there
                shares = sum(-(-parameter.numel() // self._job.data_ranks) for parameter in done)
                self._ledger.hold(shares * torch.float32.itemsize, "gradients", stream=_REDUCE_SCATTER)()
            optimized = self._hand_to_optimizer(done)
        if self._job.optimizer_in_backward:
            self._optimizers.step_in_backward(optimized)

    def _reduce_type(self, parameter: torch.Tensor) -> torch.dtype:
        if self._job.reduce_dtype is not None:
            return DTYPES[self._job.reduce_dtype]
        return DTYPES["fp32"] if self._job.masters else parameter.dtype
