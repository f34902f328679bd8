"""The guard: after the first backward, what happened is compared with what the policy said.

A flag that silently does nothing is what this project exists to end. Each region that ran is watched through the nodes
that it added to the graph and that saved something: when backward comes by one of them, the region must be recomputed.
When the first backward is over, a region that was not, or whose inputs never reached the store, is named in an error.
A block that added no such node (it was skipped, it handed its input on) owes nothing.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lowtide.errors import SilentNoOpError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.autograd.graph import Node

    from lowtide.applying.region_runtime import RegionRuntime
    from lowtide.measure import TileLedger


class Guard:
    """Watches the regions of one applied policy until one backward has been checked."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._reached: dict[str, RegionRuntime] = {}
        self._said: set[str] = set()
        self._backward = -1
        self.done = False
        self.loss: TileLedger | None = None
        """The counts of the tiled loss, if there should be one."""

    def watch(self, region: RegionRuntime, output: Any, first_node: int) -> None:
        """Note it if backward comes by a node from `first_node` on; costs nothing once the check is done."""
        if self.done:
            return
        for node in _nodes_behind(output, first_node):
            if _saves_something(node):
                node.register_prehook(lambda _grads: self._reach(region))

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
        if self.loss is not None and not self.loss.calls:
            findings.append(
                f"tile(loss): expected {self.loss.name!r} to make the loss in tiles, and it did not. The model was "
                "called without labels, or makes its loss of other logits: pass labels, or make your own loss with "
                "lowtide.linear_cross_entropy and leave tile(loss) out"
            )
        self._reached.clear()
        if not findings:
            return
        message = "\n".join(findings)
        if self._strict:
            raise SilentNoOpError(message)
        warnings.warn(f"lowtide: {message}", stacklevel=2)


def _nodes_behind(output: Any, first_node: int) -> Iterator[Node]:
    """The nodes of the graph behind some outputs that are not older than `first_node`."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    waiting = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or not first_node <= node._sequence_nr() < _ACCUMULATE_GRAD:
            continue
        seen.add(node)
        yield node
        waiting.extend(inner for inner, _ in node.next_functions if inner is not None)


_ACCUMULATE_GRAD = 2**63
"""Nodes that collect a parameter's gradient carry the highest number of all."""


def _saves_something(node: Node) -> bool:
    return any(bool(getattr(node, name)) for name in dir(node) if name.startswith("_raw_saved_"))


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
    if region.tiled and not any(tiled.calls for tiled in region.tiled):
        names = ", ".join(tiled.name for tiled in region.tiled)
        found.append(
            f"region {ledger.name!r}: expected {names} to run in tiles, saw no call of it. Its forward is bypassed: "
            "apply the policy after whatever replaces it, or leave tile(mlp) out"
        )
    return found
