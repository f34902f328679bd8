"""What the seam of a region does in training: recompute, offload or both, and let the guard see the result."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import NO_BACKWARD, graph_task_id, is_functorch_wrapped, next_sequence_number, storage_key
from lowtide.applying.caches import CacheDropper
from lowtide.checkpointing.checkpoint import run_region
from lowtide.checkpointing.forward_state import Habits
from lowtide.checkpointing.offload import offload_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from lowtide.applying.guard import Guard, WatchedRegion
    from lowtide.checkpointing import Schedule
    from lowtide.checkpointing.offload import PerTensorOffloader


class RegionRuntime:
    """Runs one region under its policy."""

    def __init__(
        self,
        region: WatchedRegion,
        schedule: Schedule | None,
        offloader: PerTensorOffloader,
        guard: Guard,
        memory: ModelMemory,
    ) -> None:
        self._region = region
        self._policy = region.policy
        self._ledger = region.ledger
        self._schedule = schedule
        self._offloader = offloader
        self._guard = guard
        self._memory = memory
        self._habits = Habits()
        self._keeping = region.keeping
        self._caches = CacheDropper(region.ledger.name, note=guard.note_cache, warn=guard.warn_once)

    def is_active(self, module: nn.Module) -> bool:
        """Return whether a backward may come. If it seems that none will, the guard sees to it that none does."""
        if torch.is_grad_enabled():
            return module.training or not self._guard.is_checked(self._region)
        if module.training:
            self._guard.expect_no_gradient(self._region, module)
        return False

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward under the policy in training, plainly in evaluation; the guard watches both."""
        if self._policy.recompute and not self._ledger.nested and graph_task_id() != NO_BACKWARD:
            self._guard.note_rerun(self._region)
        first_node = next_sequence_number()
        output = self._train(module, forward, args, kwargs) if module.training else forward(*args, **kwargs)
        self._guard.watch(self._region, output, first_node, in_training=module.training)
        return output

    def _train(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._policy.offload:
            self._memory.enter(self._ledger.name)
        if self._policy.recompute:
            args, kwargs = self._caches.dropped(module, args, kwargs)
            return run_region(
                forward,
                args,
                kwargs,
                self._ledger,
                self._schedule,
                skip=self._memory.holds,
                module=module,  # somebody may have wrapped its forward
                habits=self._habits,
                keeping=self._keeping,
            )
        self._ledger.forwards += 1
        if not self._policy.offload:
            return forward(*args, **kwargs)
        with offload_hooks(self._offloader, self._ledger):
            output = forward(*args, **kwargs)
        self._offloader.check()
        return output


class ModelMemory:
    """The addresses of a model's parameters and buffers: moving those away would free nothing.

    They are looked up again once in a while, for models do move. A stale address costs a copy too many or too few; it
    never changes a result.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._addresses: set[int] | None = None
        self._entered: set[str] = set()

    def enter(self, region: str) -> None:
        """Take note that a region runs. One that runs again begins a new round: time to look up the addresses again."""
        if self._addresses is None or region in self._entered:
            self._entered.clear()
            self._look_up()
        self._entered.add(region)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with a parameter or a buffer."""
        return self._addresses is not None and _address(tensor) in self._addresses

    def _look_up(self) -> None:
        model = self._model()
        if model is not None:
            own = itertools.chain(model.parameters(), model.buffers())
            self._addresses = {_address(tensor) for tensor in own if _has_memory(tensor)}


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has an address: subclasses may be wrappers, and those of `torch.func` are."""
    return type(tensor) in (torch.nn.Parameter, torch.Tensor) and not is_functorch_wrapped(tensor)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory is. Meta tensors have none, and are told apart by their storages instead.

    A storage does not identify memory that comes and goes: ZeRO-3 makes a new storage for each gathered weight, and the
    next activation's may be where it was.
    """
    storage = tensor.untyped_storage()
    return storage_key(storage) if tensor.device.type == "meta" else storage.data_ptr()
