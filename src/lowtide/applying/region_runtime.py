"""What the seam of a block does in training: recompute, offload or both, and let the guard see the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

from lowtide.applying.caches import CACHES, is_cache, places_of, refuse_content
from lowtide.checkpointing.core import run_region
from lowtide.checkpointing.offloading import offload_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from lowtide.applying.guard import Guard
    from lowtide.applying.handle import Applied
    from lowtide.applying.own_memory import OwnMemory
    from lowtide.checkpointing import Schedule
    from lowtide.checkpointing.saving import OneByOne
    from lowtide.measure import RegionLedger, TileLedger
    from lowtide.policy import Policy


class RegionRuntime:
    """What a region needs while the policy is in force. It stays in this process."""

    def __init__(
        self,
        policy: Policy,
        ledger: RegionLedger,
        schedule: Schedule | None,
        conveyor: OneByOne,
        guard: Guard,
        owned: OwnMemory,
        owner: Applied,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.schedule = schedule
        self.conveyor = conveyor
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
        first_node = _get_sequence_nr()
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
            with offload_hooks(self.conveyor, self.ledger):
                output = forward(*args, **kwargs)
            self.conveyor.check()
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
