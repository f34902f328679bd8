"""The seam: an object in a block's instance dictionary that takes the place of its `forward`.

Hooks of the block (FSDP's, DeepSpeed's, a user's) stay outside it. It knows its module, so a deep copy or an
unpickled model calls its own parameters; and it is active only in the model that the policy was applied to: a copy
runs plainly.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import noop_context_fn

from lowtide.checkpointing.core import run_region
from lowtide.checkpointing.offloading import offload_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from lowtide.applying.guard import Guard
    from lowtide.applying.handle import Applied
    from lowtide.checkpointing import Schedule
    from lowtide.checkpointing.saving import OneByOne
    from lowtide.measure import RegionLedger
    from lowtide.policy import Policy

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Keywords under which models hand key-value caches to their blocks."""

OPTIONS = {
    "context_fn": noop_context_fn,
    "determinism_check": "default",
    "debug": False,
    "early_stop": True,
    "preserve_rng_state": True,
}


class RegionRuntime:
    """What a region needs while the policy is in force. It stays in this process."""

    def __init__(
        self,
        policy: Policy,
        ledger: RegionLedger,
        schedule: Schedule | None,
        conveyor: OneByOne,
        guard: Guard,
        skip: Callable[[torch.Tensor], bool],
        owner: Applied,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.schedule = schedule
        self.conveyor = conveyor
        self.guard = guard
        self.skip = skip
        self.owner = owner

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward under its policy."""
        if not self.policy.recompute:
            self.ledger.forwards += 1
            with offload_hooks(self.conveyor, self.ledger):
                return forward(*args, **kwargs)
        args, kwargs = self._without_caches(args, kwargs)
        return run_region(
            forward, args, kwargs, ledger=self.ledger, schedule=self.schedule, options=OPTIONS, skip=self.skip
        )

    def _without_caches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A recomputed forward would write to a cache twice, and training has no use for one."""
        found = [name for name in CACHES if kwargs.get(name) is not None]
        positional = [_is_cache(arg) for arg in args]
        if not found and not any(positional):
            return args, kwargs
        self.guard.say_once(f"key-value caches are dropped in training (first seen in {self.ledger.name})")
        args = tuple(None if is_cache else arg for arg, is_cache in zip(args, positional, strict=True))
        return args, {**kwargs, **dict.fromkeys(found)}


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache") and hasattr(value, "update")


class RegionForward:
    """Takes the place of one block's `forward`."""

    def __init__(self, module: nn.Module, runtime: RegionRuntime | None) -> None:
        self.module = module
        self.runtime = runtime
        self.replaced = module.__dict__.get("forward")  # somebody else's, if there was one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.runtime is None or not self.module.training or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        output = self.runtime.run(self.plain, args, kwargs)
        self.runtime.guard.watch(self.runtime, output)
        return output

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward as it was."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def install(self) -> None:
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        self.runtime = None
        if self.module.__dict__.get("forward") is not self:
            return  # somebody wrapped it since: what they hold runs plainly from now on
        if self.replaced is not None:
            self.module.__dict__["forward"] = self.replaced
        else:
            del self.module.__dict__["forward"]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles get the module, not the runtime: streams and pinned memory belong to this process."""
        return {"module": self.module, "runtime": None, "replaced": self.replaced}

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionForward:
        twin = RegionForward.__new__(RegionForward)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return twin
