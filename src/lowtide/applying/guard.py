"""The guard: after the first backward, what happened is compared with what the policy said.

A flag that silently does nothing is what this project exists to end. Each region that ran is watched through the nodes
that it added to the graph and that saved something: when backward comes by one of them, the region must be recomputed.
When the first backward is over, a region that was not, or whose inputs never reached the store, is named in an error.
The others are watched on, for a batch of texts says nothing about a vision tower; what is found about them later is a
warning, for it should not end a run that has trained for hours.
A block that added no such node (it was skipped, it handed its input on) owes nothing. Nor does one that ran without
gradients, as frozen towers do, unless gradients arrive at its parameters all the same. A block in evaluation mode runs
plainly; if backward comes by it all the same, somebody forgot `model.train()`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import after_backward, graph_task_id, pytree, saved_fields, sequence_number
from lowtide.applying.caches import DroppedCaches
from lowtide.errors import SilentNoOpError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from lowtide.applying.region_runtime import RegionRuntime
    from lowtide.counters import TileLedger


class Guard:
    """Watches the regions of one applied policy, each until one backward that came by it has been checked."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._reached: dict[str, RegionRuntime] = {}
        self._said: set[str] = set()
        self._backward = -1
        self._without_gradients: dict[str, RemovableHandle] = {}
        self._by_itself: set[str] = set()
        self._in_evaluation: set[str] = set()
        self._caches = DroppedCaches()
        self._settled: set[str] = set()
        self._has_checked = False
        self.loss: TileLedger | None = None
        """The counts of the tiled loss, if there should be one."""

    def is_settled(self, region: RegionRuntime) -> bool:
        """Whether a backward that came by it has been checked."""
        return region.ledger.name in self._settled

    def watch(self, region: RegionRuntime, output: Any, first_node: int, *, in_training: bool) -> None:
        """Note it if backward comes by a node from `first_node` on; costs nothing once that has been checked."""
        if self.is_settled(region):
            return
        if not in_training:
            self._in_evaluation.add(region.ledger.name)
        for node in _nodes_behind(output, first_node):
            if _saves_something(node):
                node.register_prehook(lambda _grads: self._reach(region))

    def expect_no_gradient(self, region: RegionRuntime, module: nn.Module) -> None:
        """A block that ran without gradients in forward, and receives some, is differentiated by the model's own code
        (Reformer's reversible layers), where no policy acts. Once it has run with gradients, too, all is well: so do
        blocks inside somebody's reentrant checkpoint, and blocks that also serve as a frozen reference."""
        name = region.ledger.name
        if self._has_checked or name in self._without_gradients:
            return
        parameter = next((p for p in module.parameters() if p.requires_grad and p.is_leaf), None)
        if parameter is not None:
            self._without_gradients[name] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._receive(region)
            )

    def note_cache(self, cache: Any, places: set[int], name: str) -> None:
        """A block was given a cache, and it was dropped."""
        if not self._has_checked:
            self._caches.note(cache, places, name)

    def close(self) -> None:
        """Leave no hook behind."""
        for handle in self._without_gradients.values():
            handle.remove()
        self._without_gradients.clear()

    def say_once(self, message: str) -> None:
        """A warning, the first time."""
        if message.partition("(")[0] not in self._said:
            self._said.add(message.partition("(")[0])
            warnings.warn(f"lowtide: {message}", stacklevel=2)

    def _reach(self, region: RegionRuntime) -> None:
        if self.is_settled(region):
            return
        backward = graph_task_id()
        if backward != self._backward:  # a new one; if the last failed, its callback never came
            self._backward = backward
            self._reached.clear()
            after_backward(self._check)
        self._reached[region.ledger.name] = region

    def _receive(self, region: RegionRuntime) -> None:
        acts = region.policy.recompute or region.policy.offload
        if acts and not region.ledger.forwards:
            self._by_itself.add(region.ledger.name)
            self._reach(region)

    def _check(self) -> None:
        is_first, self._has_checked = not self._has_checked, True
        findings = [text for region in self._reached.values() for text in self._findings(region)]
        if is_first:  # what is looked at once: dropped caches, the loss, and blocks that ran without gradients
            findings += self._findings_of_the_model()
            self._caches = DroppedCaches()
            self.close()
        self._settled.update(self._reached)
        twice = [name for name, region in self._reached.items() if region.policy.recompute and region.ledger.nested]
        self._reached.clear()
        if findings and self._strict and is_first:
            raise SilentNoOpError("\n".join(findings))
        if findings:
            warnings.warn("lowtide: " + "\n".join(findings), stacklevel=2)
        elif twice:
            warnings.warn(f"lowtide: {_recomputed_twice(twice[0])}", stacklevel=2)

    def _findings_of_the_model(self) -> list[str]:
        findings = [_read_elsewhere(*names) for names in self._caches.missed(self._reached)]
        if self.loss is not None and not self.loss.calls:
            findings.append(
                f"tile(loss): expected {self.loss.name!r} to make the loss in tiles, and it did not. The model was "
                "called without labels or in evaluation mode, or makes its loss of other logits: pass labels, or make "
                "your own loss with lowtide.linear_cross_entropy and leave tile(loss) out"
            )
        return findings

    def _findings(self, region: RegionRuntime) -> list[str]:
        name = region.ledger.name
        if name in self._by_itself:
            return [_differentiated_by_itself(name)]
        found = _findings(region)
        return [_ran_in_evaluation(name)] if found and name in self._in_evaluation else found


def _nodes_behind(output: Any, first_node: int) -> Iterator[Node]:
    """The nodes of the graph behind some outputs that are not older than `first_node`."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    waiting = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or not first_node <= sequence_number(node) < _ACCUMULATE_GRAD:
            continue
        seen.add(node)
        yield node
        waiting.extend(inner for inner, _ in node.next_functions if inner is not None)


_ACCUMULATE_GRAD = 2**63
"""Nodes that collect a parameter's gradient carry the highest number of all."""


def _saves_something(node: Node) -> bool:
    return any(bool(getattr(node, name)) for name in saved_fields(type(node)))


def _findings(region: RegionRuntime) -> list[str]:
    ledger, policy = region.ledger, region.policy
    found = []
    if policy.recompute and ledger.recomputes == 0:
        found.append(
            f"region {ledger.name!r}: expected a recompute in backward, saw {ledger.forwards} forwards and none. "
            "Something inside it keeps its own graph: name smaller regions with regions=[...]"
        )
    if policy.offload and ledger.movable_bytes == 0 and ledger.nested:
        found.append(_inside_another(ledger.name))
    elif policy.offload and ledger.movable_bytes == 0:
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


_SWITCH_OFF = (
    "switch that off (gradient_checkpointing=False, where a trainer switches it on after the policy was applied), or "
    "apply the policy after it, as LowtideCallback does"
)


def _inside_another(name: str) -> str:
    return (
        f"region {name!r}: expected its saved tensors to be offloaded, and it ran inside another checkpoint, which "
        f"keeps the inputs itself: {_SWITCH_OFF}"
    )


def _recomputed_twice(name: str) -> str:
    return f"region {name!r} ran inside another checkpoint, so it is recomputed twice: {_SWITCH_OFF}"


def _ran_in_evaluation(name: str) -> str:
    return (
        f"region {name!r}: it ran in evaluation mode, where a policy does nothing, and backward comes by it. Call "
        "model.train() before training (from_pretrained returns models in evaluation mode), or leave the region out "
        f"with a rule: '{name}: none'"
    )


def _differentiated_by_itself(name: str) -> str:
    return (
        f"region {name!r}: it ran without gradients in forward, and gradients arrive at its parameters. The model "
        "differentiates it by code of its own (reversible layers, an autograd.Function), where nothing is saved that "
        "could be recomputed or offloaded: name other regions with regions=[...], or leave this model as it is"
    )


def _read_elsewhere(name: str, other: str) -> str:
    return (
        f"region {name!r}: its key-value cache was dropped, as caches are in training, and {other!r} goes on from that "
        "cache: the model computes something else without it. Name blocks that take no cache with regions=[...]"
    )
