"""Records every byte of a simulated step, from the operation that makes it to its last reference.

The ledger is a dispatch mode and sees each operation's results. A storage that it has not seen before is an allocation;
a finalizer on the storage is its release. It writes a list of events, in order; peaks, owners, the timeline and the
bytes that a caching allocator would reserve are all read out of that list afterwards. Each operation's cost goes to the
virtual clock as well.

Where a tensor is used several times, autograd's engine sums its gradients, and adds in place to a sum that nobody else
has. It never does inside a dispatch mode, so the ledger does it in the engine's place.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import TorchDispatchMode, no_dispatch_modes, operator_of, references_to, storage_key
from lowtide.recording import Event, Moment, Owner, tensors_in, tensors_of
from lowtide.simulation import values
from lowtide.simulation.attention import workspace_of
from lowtide.simulation.costs import cost_of
from lowtide.simulation.meta_tensors import MetaKernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.hardware.accelerators import Rates
    from lowtide.simulation.clock import Clock
    from lowtide.simulation.costs import Cost


aten = torch.ops.aten


@dataclasses.dataclass
class Traffic:
    """Exchanges between ranks, by phase of the step and kind of exchange."""

    counts: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    nbytes: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    """What one rank sends."""

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return counts and bytes by `phase kind`, as they are shown and kept."""
        return {
            f"{phase} {kind}": {"count": count, "bytes": self.nbytes[phase, kind]}
            for (phase, kind), count in sorted(self.counts.items())
        }


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a step. `rounding` is the allocator's unit; host memory is counted to the byte."""

    def __init__(
        self, clock: Clock, rates: Rates, device: torch.device, rounding: int = 512, kernels: MetaKernels | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self.rates = rates
        self.device = device
        self.rounding = rounding
        self.events: list[Event] = []
        self.operations = 0
        self.phase = "build"
        self.traffic = Traffic()
        """What ranks that share a batch exchange."""
        self.in_optimizer = False
        """Whether the optimizer works inside backward: what it makes is its own."""
        self.regions: list[str] = [""]
        """The regions that run now, the innermost last; `""` is outside all regions."""
        self.logits_width = 0
        """The last dimension by which logits are recognised; 0 if the model has none."""
        self.stored_as: dict[int, int] = {}
        """The bytes of weights that are kept in a different form (4 bits, a shard), by storage."""
        self.quantized: set[int] = set()
        """The storages of those weights that are unpacked for every product."""
        self.stream = ""
        """The stream that allocates now; empty for compute."""
        self.composed: set[Any] = set()
        """Operators whose kernels show the ledger their own operations."""
        self._references_of_a_sum = _references_of_a_sum()
        self._kernels = kernels or MetaKernels()
        self._numbers = itertools.count()
        self._known: dict[int, tuple[int, int, str, Owner]] = {}

    @property
    def moment(self) -> Moment:
        """Return where the step is now."""
        return Moment(self.phase, self.regions[-1])

    def claim(self, tensor: torch.Tensor, kind: str, region: str | None = None) -> None:
        """Say whose a tensor is. It is counted from now on if it was not before."""
        owner = Owner(kind, self.moment.region if region is None else region)
        key = storage_key(tensor.untyped_storage())
        if key not in self._known:
            self._allocate(tensor, owner)
            return
        number, size, place, _ = self._known[key]
        self._known[key] = (number, size, place, owner)
        self._write(0, number, place, owner)

    def exclude(self, tensor: torch.Tensor) -> None:
        """Stop counting a tensor whose memory is counted elsewhere."""
        key = storage_key(tensor.untyped_storage())
        number, size, place, owner = self._known[key]
        self._known[key] = (number, 0, place, owner)
        self._write(-size, number, place, owner)

    def hold(self, nbytes: int, kind: str, region: str | None = None, *, stream: str = "") -> Release:
        """Count bytes that no tensor has (a workspace, a bucket, gathered weights) until the result is called."""
        owner = Owner(kind, self.moment.region if region is None else region)
        number = next(self._numbers)
        size = self._rounded(nbytes)
        self._write(size, number, "device", owner, stream)
        return Release(self, size, number, owner)

    def charge_copy(self, nbytes: int) -> None:
        """Charge compute for a copy within the device that reads and writes so many bytes."""
        self.clock.kernel(nbytes / (self.rates.bandwidth * self.rates.memory), "memory")

    @contextlib.contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        """Let tensors that are made inside be allocated on another stream than compute."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer torch. Nothing is compiled here, and to skip its compiler would cost a call per operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default or func in self.composed:
            return func(*args, **kwargs)
        self.operations += 1
        if func is aten.add.Tensor and references_to(args[0]) == self._references_of_a_sum:
            func = aten.add_.Tensor
        if operator_of(func) is torch.ops.aten.record_stream:
            return None  # a hint to the allocator, which the engine gives only off the compute stream
        inputs = tensors_of(args, kwargs)
        out = values.run_operation(func, args, kwargs, inputs, self._kernels)
        results = tensors_in((out,))
        for tensor in results:
            if storage_key(tensor.untyped_storage()) not in self._known:
                self._allocate(tensor, self._owner_of(tensor))
        workspace = workspace_of(operator_of(func), args, self.quantized)
        if workspace:
            self.hold(workspace, "workspace")()
        self._charge(cost_of(func, args, kwargs, out, inputs + results))
        return out

    def _owner_of(self, tensor: torch.Tensor) -> Owner:
        is_logits = self.logits_width and tensor.dim() and tensor.shape[-1] == self.logits_width
        kind = (
            "optimizer" if self.phase == "optimizer" or self.in_optimizer else "logits" if is_logits else "activations"
        )
        return Owner(kind, self.moment.region)

    def _allocate(self, tensor: torch.Tensor, owner: Owner) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        place = "device" if tensor.device.type == self.device.type else "host"
        nbytes = self.stored_as.get(key, storage.nbytes())
        size = self._rounded(nbytes) if place == "device" else nbytes
        number = next(self._numbers)
        self._known[key] = (number, size, place, owner)
        weakref.finalize(storage, self._release, key).atexit = False
        self._write(size, number, place, owner, self.stream)

    def _release(self, key: int) -> None:
        number, size, place, owner = self._known.pop(key)
        self._write(-size, number, place, owner)

    def _write(self, change: int, number: int, place: str, owner: Owner, stream: str = "") -> None:
        self.events.append(Event(change, number, place, owner, self.moment, self.clock.compute.time, stream))

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.rounding) * self.rounding

    def _charge(self, cost: Cost) -> None:
        if cost.direction is not None:
            self.clock.copy(cost.nbytes, cost.direction, blocking=cost.blocking)
        elif cost.nbytes:
            self.clock.kernel(cost.seconds(self.rates), cost.kind)


@functools.cache
def _references_of_a_sum() -> tuple[int, int, int]:
    """Return how often a gradient is referred to that nothing but autograd's engine has, when another is added to it.

    Outside of dispatch modes the engine adds in place then; inside one it never does.
    Source: `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp.
    """
    mode = _SumOfGradients()  # type: ignore[no-untyped-call]
    with no_dispatch_modes(), torch.enable_grad(), mode:
        weight = torch.ones(2, device="meta", requires_grad=True)
        torch.autograd.backward(weight * 2 + weight * 3, torch.ones(2, device="meta"))
    found: tuple[int, int, int] = mode.found
    return found


class _SumOfGradients(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the references to a gradient as the ledger would, when another is added to it."""

    found = (0, 0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.add.Tensor and not torch.is_grad_enabled():
            self.found = references_to(args[0])
        return func(*args, **kwargs)


class Release:
    """Gives held bytes back, once."""

    def __init__(self, ledger: Ledger, size: int, number: int, owner: Owner) -> None:
        self.nbytes = size
        self._ledger: Ledger | None = ledger
        self._event = (-size, number, "device", owner)

    def __call__(self) -> None:
        if self._ledger is not None:
            self._ledger._write(*self._event)
            self._ledger = None
