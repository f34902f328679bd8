"""The guard: after the first backward, what happened is compared with what the policy said.

A flag that silently does nothing is what this project exists to end. Each region that ran is watched through one
gradient hook on its output; when the first backward is over, a region that got a gradient and was not recomputed, or
whose inputs never reached the store, is named in an error.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lowtide.errors import SilentNoOpError

if TYPE_CHECKING:
    from lowtide.applying.region_forward import RegionRuntime

logger = logging.getLogger(__name__)


class Guard:
    """Watches the regions of one applied policy until one backward has been checked."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._reached: dict[str, RegionRuntime] = {}
        self._said: set[str] = set()
        self._backward = -1
        self.done = False

    def watch(self, region: RegionRuntime, output: Any) -> None:
        """Note it if backward comes by; costs nothing once the check is done."""
        if self.done:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _grad: self._reach(region))  # type: ignore[no-untyped-call]
                return

    def say_once(self, message: str) -> None:
        """A warning, the first time."""
        if message.partition("(")[0] not in self._said:
            self._said.add(message.partition("(")[0])
            warnings.warn(f"lowtide: {message}", stacklevel=2)

    def _reach(self, region: RegionRuntime) -> None:
        if self.done:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # a new one; if the last failed, its callback never came
            self._backward = backward
            self._reached.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._check)
        self._reached[region.ledger.name] = region

    def _check(self) -> None:
        self.done = True
        findings = [text for region in self._reached.values() for text in _findings(region)]
        self._reached.clear()
        if not findings:
            return
        message = "\n".join(findings)
        if self._strict:
            raise SilentNoOpError(message)
        warnings.warn(f"lowtide: {message}", stacklevel=2)


def _findings(region: RegionRuntime) -> list[str]:
    ledger, policy = region.ledger, region.policy
    found = []
    if policy.recompute and ledger.recomputes == 0:
        found.append(
            f"region {ledger.name!r}: expected a recompute in backward, saw {ledger.forwards} forwards and none. "
            "Something inside it keeps its own graph: name smaller regions with regions=[...]"
        )
    if policy.offload and ledger.movable_bytes == 0:
        found.append(
            f"region {ledger.name!r}: expected its saved tensors to be offloaded, saw none that could be: "
            f"{ledger.saved_bytes} bytes stay on the device. Its inputs are small, are parameters, or are hidden in an "
            "object of an unknown kind: pass them as tensors, or set the policy of this region to 'recompute'"
        )
    return found
