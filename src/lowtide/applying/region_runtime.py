"""Which memory is a model's own: moving a parameter or a buffer away would free nothing.

What the seam of a block does in training: recompute, offload or both, and let the guard see the result.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import next_sequence_number, storage_key
from lowtide.applying.caches import CACHES, is_cache, places_of, refuse_content
from lowtide.checkpointing.checkpoint import run_region
from lowtide.checkpointing.offload import offload_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from lowtide.applying.applied import Applied
    from lowtide.applying.guard import Guard
    from lowtide.checkpointing import Schedule
    from lowtide.checkpointing.offload import PerTensorOffloader
    from lowtide.counters import RegionLedger, TileLedger
    from lowtide.policy import Policy


class OwnMemory:
    """The addresses of a model's parameters and buffers, looked up again once in a while, for models do move.

    A stale address costs a copy too many or too few; it never changes a result.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._addresses: set[int] | None = None
        self._entered: set[str] = set()

    def enter(self, region: str) -> None:
        """A region runs. One that comes again begins a new round: time to look again."""
        if self._addresses is None or region in self._entered:
            self._entered.clear()
            self._look()
        self._entered.add(region)

    def _look(self) -> None:
        model = self._model()
        if model is not None:
            own = itertools.chain(model.parameters(), model.buffers())
            self._addresses = {_address(tensor) for tensor in own if type(tensor) in (torch.nn.Parameter, torch.Tensor)}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a parameter or a buffer."""
        return self._addresses is not None and _address(tensor) in self._addresses


def _address(tensor: torch.Tensor) -> int:
    """Where its memory is. Tensors of a plan have none, and are told apart by their storages instead.

    A storage is no name for memory that comes and goes: ZeRO-3 makes a new one for each gathered weight, and the next
    activation's may be where it was.
    """
    storage = tensor.untyped_storage()
    return storage_key(storage) if tensor.device.type == "meta" else storage.data_ptr()


class RegionRuntime:
    """What a region needs while the policy is in force. It stays in this process."""

    def __init__(
        self,
        policy: Policy,
        ledger: RegionLedger,
        schedule: Schedule | None,
        offloader: PerTensorOffloader,
        guard: Guard,
        owned: OwnMemory,
        owner: Applied,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.schedule = schedule
        self.offloader = offloader
        self.guard = guard
        self.owned = owned
        self.tiled: list[TileLedger] = []
        """The counts of the modules in it that are tiled."""
        self.owner = owner
        self._places: set[int] | None = None
        """Where it writes to in a cache; known once it was given one."""

    def is_active(self, module: nn.Module) -> bool:
        """Whether a backward may come. If there seems to be none, the guard sees to it that there is none."""
        if module.training and not torch.is_grad_enabled():
            self.guard.expect_no_gradient(self, module)
        return torch.is_grad_enabled() and (module.training or not self.guard.is_settled(self))

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward: under its policy in training, plainly in evaluation. The guard wants to know of both."""
        first_node = next_sequence_number()
        output = self._run(module, forward, args, kwargs) if module.training else forward(*args, **kwargs)
        self.guard.watch(self, output, first_node, in_training=module.training)
        return output

    def _run(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.policy.offload:
            self.owned.enter(self.ledger.name)
        if not self.policy.recompute:
            self.ledger.forwards += 1
            if not self.policy.offload:
                return forward(*args, **kwargs)
            with offload_hooks(self.offloader, self.ledger):
                output = forward(*args, **kwargs)
            self.offloader.check()
            return output
        args, kwargs = self._without_caches(module, args, kwargs)
        return run_region(
            forward,
            args,
            kwargs,
            ledger=self.ledger,
            schedule=self.schedule,
            skip=self.owned.holds,
            module=module,  # somebody may have wrapped its forward
        )

    def _without_caches(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A recomputed forward would write to a cache twice, and training has no use for one."""
        found = [name for name, value in kwargs.items() if value is not None and (name in CACHES or is_cache(value))]
        positional = [is_cache(arg) for arg in args]
        if not found and not any(positional):
            return args, kwargs
        if self._places is None:
            self._places = places_of(module)
        for cache in (*(kwargs[name] for name in found), *filter(is_cache, args)):
            refuse_content(cache, self._places, self.ledger.name)
            self.guard.note_cache(cache, self._places, self.ledger.name)
        self.guard.say_once(f"key-value caches are dropped in training (first seen in {self.ledger.name})")
        args = tuple(None if is_one else arg for arg, is_one in zip(args, positional, strict=True))
        return args, {**kwargs, **dict.fromkeys(found)}
