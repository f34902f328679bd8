"""Models exchanges between ranks inside a step: what they allocate, when they happen, and how long compute waits.

Only one rank is simulated, and all others do the same, so an exchange is a tensor of the right shape, and time. Each is
a node of the graph where its gradient needs an exchange too, so that a region that runs again exchanges again, as on
real ranks. The ledger's `traffic` has them by phase and kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.simulation.clock import Stream

if TYPE_CHECKING:
    from lowtide.simulation.ledger import Ledger

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often all of a tensor but a rank's own share goes over the network."""


class Group:
    """Ranks that exchange tensors in the middle of a step, seen from one of them."""

    def __init__(self, ranks: int, ledger: Ledger, bytes_per_second: float) -> None:
        self.ranks = ranks
        self._ledger = ledger
        self._bytes_per_second = bytes_per_second

    def copy_to_ranks(self, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Return the tensor that all ranks have; its gradient is the sum of theirs."""
        out: torch.Tensor = _Replicated.apply(tensor, self, in_place)  # type: ignore[no-untyped-call]
        return out

    def sum_over_ranks(self, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Return the sum of all ranks' tensors; each gets its gradient as it is."""
        out: torch.Tensor = _Summed.apply(tensor, self, in_place)  # type: ignore[no-untyped-call]
        return out

    def gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors side by side; each gets its part of the gradient."""
        out: torch.Tensor = _GatheredLast.apply(tensor, self)  # type: ignore[no-untyped-call]
        return out

    def exchange_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what all ranks send here of a tensor whose first dimension counts ranks; the gradient goes back."""
        out: torch.Tensor = _Exchanged.apply(tensor, self)  # type: ignore[no-untyped-call]
        return out

    def send(self, nbytes: int, kind: str) -> None:
        """Let compute wait for an exchange of tensors of this size: the whole one, of which each rank has a share."""
        self._exchange(round(_ROUNDS[kind] * nbytes * (1 - 1 / self.ranks)), kind)

    def _exchange(self, sent: int, kind: str) -> None:
        ledger = self._ledger
        ledger.traffic.counts[ledger.phase, kind] += 1
        ledger.traffic.nbytes[ledger.phase, kind] += sent
        ledger.clock.kernel(sent / self._bytes_per_second, "network")

    def begin_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Stream]:
        """Gather all ranks' tensors beside compute. They are there when compute has waited (`wait`)."""
        with self._beside() as arrival:
            gathered = self.all_gather(tensor)
        return gathered, arrival

    def pass_on(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Stream]:
        """Send a tensor to the next rank beside compute, for one of the same shape from the rank before."""
        with self._beside() as arrival:
            received = torch.empty_like(tensor)
            self._exchange(tensor.nbytes, "all_to_all")
        return received, arrival

    def wait(self, arrival: Stream) -> None:
        """Let compute wait for an exchange that was begun beside it."""
        self._ledger.clock.compute.wait_stream(arrival)

    def _beside(self) -> Stream:
        stream = Stream(self._ledger.clock)
        stream.wait_stream(self._ledger.clock.current)
        return stream

    def all_reduce(self, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Sum a tensor over the ranks, into a new one or in its own memory."""
        total = tensor.view_as(tensor) if in_place else torch.empty_like(tensor)
        self.send(tensor.nbytes, "all_reduce")
        return total

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' tensors along the first dimension."""
        gathered = tensor.new_empty(self.ranks * tensor.shape[0], *tensor.shape[1:])
        self.send(gathered.nbytes, "all_gather")
        return gathered


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, in_place: bool) -> torch.Tensor:
        ctx.group, ctx.in_place = group, in_place
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.all_reduce(grads[0], in_place=ctx.in_place), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor, group: Group, in_place: bool) -> torch.Tensor:
        return group.all_reduce(tensor, in_place=in_place)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class _GatheredLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.ranks = group.ranks
        return torch.cat(group.all_gather(tensor).chunk(group.ranks), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].chunk(ctx.ranks, dim=-1)[0].contiguous(), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _exchange(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchange(grads[0], ctx.group), None


def _exchange(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    group.send(tensor.nbytes, "all_to_all")
    return received
