"""The guard: compares what happened with what the policy said, after the first backward.

A flag that silently does nothing is what this project exists to end. Each region that ran is watched through the nodes
that it added to the graph and that saved something: if backward reaches one of them, the region must be recomputed.
When the first backward is over, a region that was not recomputed, or whose inputs never reached the store, is named in
an error; so is one whose inputs are all too small for the store, unless other regions have larger ones. Regions that
this backward did not reach are watched further, for a batch of texts says nothing about a vision tower; what is found
about them later is a warning, for it should not end a run that has trained for hours.

A region that added no such node (it was skipped, or returned its input) owes nothing. Nor does one that ran without
gradients, as frozen towers do, unless gradients arrive at its parameters all the same. A region in evaluation mode runs
plainly; if backward reaches it all the same, somebody forgot `model.train()`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import (
    after_backward,
    graph_task_id,
    outside_graph,
    pytree,
    runs_compiled_backward,
    saved_fields,
    sequence_number,
)
from lowtide.applying.caches import DroppedCaches
from lowtide.errors import SilentNoOpError
from lowtide.notices import warn

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from lowtide.checkpointing.keeping import Keeping
    from lowtide.counters import RegionLedger, TileLedger
    from lowtide.policy import Policy


@dataclasses.dataclass(frozen=True)
class WatchedRegion:
    """A region as the guard sees it: what was asked for, and what was counted."""

    policy: Policy
    ledger: RegionLedger
    tiles: tuple[TileLedger, ...] = ()
    """The counts of the modules in it that are tiled."""
    keeping: Keeping | None = None
    """What it keeps instead of recomputing it."""

    @property
    def name(self) -> str:
        return self.ledger.name

    @property
    def keeps_nothing(self) -> bool:
        """Whether it ran, and never called an operator whose output it should keep."""
        return self.keeping is not None and self.ledger.forwards > self.ledger.nested and not self.ledger.kept_outputs

    @property
    def is_too_small(self) -> bool:
        """Whether it should be offloaded, and all that it saved are small tensors and weights."""
        return bool(self.policy.offload) and self.ledger.is_small


class Guard:
    """Watches the regions of one applied policy, each until a backward that reached it has been checked."""

    def __init__(self, *, strict: bool) -> None:
        self.loss: TileLedger | None = None
        """The counts of the tiled loss, if the policy tiles it."""
        self.regions: list[WatchedRegion] = []
        """All regions that the policy acts on."""
        self.find_replaced: Callable[[], list[str]] = list
        """Names modules that were replaced since the policy was applied: it went with them."""
        self._strict = strict
        self._backward: int | None = None
        self._reached: dict[str, WatchedRegion] = {}
        """The regions that the running backward has reached."""
        self._checked: set[str] = set()
        self._has_checked_first = False
        self._said: set[str] = set()
        self._in_evaluation: set[str] = set()
        self._without_gradients: dict[str, RemovableHandle] = {}
        self._differentiated_by_model: set[str] = set()
        self._caches = DroppedCaches()
        self._uncut: dict[str, str] = {}
        """Blocks that should run in tiles and never can, each with the reason."""
        self._rerun = False
        """Whether a region ran inside a backward: in a reentrant checkpoint of somebody else's."""

    def is_checked(self, region: WatchedRegion) -> bool:
        """Return whether a backward that reached `region` has been checked."""
        return region.name in self._checked

    def watch(self, region: WatchedRegion, output: Any, first_node: int, *, in_training: bool) -> None:
        """Take note if backward reaches a node from `first_node` on. Costs nothing once the region is checked."""
        if self._reached and self._backward == _COMPILED and not runs_compiled_backward():
            self._check()
        if self.is_checked(region):
            return
        if not in_training:
            self._in_evaluation.add(region.name)
        for node in _nodes_behind(output, first_node):
            if _saves_something(node):
                node.register_prehook(lambda _grads: self._reach(region))

    def expect_no_gradient(self, region: WatchedRegion, module: nn.Module) -> None:
        """Take note if gradients arrive at a region that ran without gradients in forward.

        Then the model's own code differentiates it (Reformer's reversible layers), where no policy acts. Once the
        region has run with gradients, too, all is well: so do regions inside somebody's reentrant checkpoint, and
        regions that also serve as a frozen reference.
        """
        if self._has_checked_first or region.name in self._without_gradients:
            return
        parameter = next((p for p in module.parameters() if p.requires_grad and p.is_leaf), None)
        if parameter is not None:
            self._without_gradients[region.name] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._receive_gradient(region)
            )

    def note_rerun(self, region: WatchedRegion) -> None:
        """Take note that a region is called while a backward runs, and warn: it will be recomputed once more."""
        if not self._rerun:
            self._rerun = True
            warn(_rerun_in_backward(region))

    def note_uncut(self, name: str, reason: str) -> None:
        """Take note that block `name` should run in tiles, and that none of its calls can be cut."""
        self._uncut.setdefault(name, reason)

    def note_unkept(self, name: str) -> None:
        """Take note that tiles of block `name` kept no attention in a call. The first calls, `_check` looks at."""
        if name in self._checked:
            self.warn_once(
                f"keep=attention keeps nothing in calls whose attention the model's own function computes in tiles "
                f"(first seen in {name}: eager attention, dropout, a mask where no kernel takes one): they compute it "
                "again in backward"
            )

    def note_cache(self, cache: Any, layers: set[int], name: str) -> None:
        """Take note that region `name` was given a cache for these layers, and that it was dropped."""
        if not self._has_checked_first:
            self._caches.note(cache, layers, name)

    def object_to_replaced(self) -> None:
        """Refuse to train modules that were replaced before the first backward; warn if it was later."""
        replaced = self.find_replaced()
        if not replaced:
            return
        if self._strict and not self._has_checked_first:
            raise SilentNoOpError(_replaced(replaced))
        self.warn_once(_replaced(replaced))

    def warn_once(self, message: str) -> None:
        """Warn, unless the same was said before; what is in brackets may differ."""
        topic = message.partition("(")[0]
        if topic not in self._said:
            self._said.add(topic)
            warn(message)

    def close(self) -> None:
        """Remove the hooks on parameters."""
        for handle in self._without_gradients.values():
            handle.remove()
        self._without_gradients.clear()

    @outside_graph  # compiled autograd would look into it
    def _reach(self, region: WatchedRegion) -> None:
        if self.is_checked(region):
            return
        backward = _COMPILED if runs_compiled_backward() else graph_task_id()
        if backward != self._backward:  # a new one; if the last failed, its callback never came
            self._backward = backward
            self._reached.clear()
            if backward != _COMPILED:
                after_backward(self._check)
        self._reached[region.name] = region

    def _receive_gradient(self, region: WatchedRegion) -> None:
        acts = region.policy.recompute or region.policy.offload
        if acts and not region.ledger.forwards:
            self._differentiated_by_model.add(region.name)
            self._reach(region)

    def _check(self) -> None:
        is_first, self._has_checked_first = not self._has_checked_first, True
        reached = [region for region in self.regions if region.name in self._reached]  # in the model's order
        findings = [text for region in reached for text in self._findings_about(region)]
        findings += self._findings_about_small([region for region in reached if region.is_too_small])
        findings += self._findings_about_kept([region for region in reached if region.keeps_nothing])
        if is_first:  # looked at once: dropped caches, the loss, blocks, and regions that ran without gradients
            findings += self._findings_about_model()
            self._caches = DroppedCaches()
            self.close()
        self._checked.update(self._reached)
        twice = [region for region in reached if region.policy.recompute and region.ledger.nested]
        self._reached.clear()
        if findings and self._strict and is_first:
            raise SilentNoOpError("\n".join(_grouped(findings)))
        if findings:
            warn("\n".join(_grouped(findings)))
        elif twice:
            warn(_recomputed_twice(twice[0]))

    def _findings_about(self, region: WatchedRegion) -> list[str]:
        if region.name in self._differentiated_by_model:
            return [_differentiated_by_model(region.name)]
        findings = _missing_effects(region)
        return [_ran_in_evaluation(region.name)] if findings and region.name in self._in_evaluation else findings

    def _findings_about_small(self, regions: list[WatchedRegion]) -> list[str]:
        """Note regions that have nothing to offload, and object only if that is all there is to the policy's offload.

        It does not warn: a small tower beside a large model is not a fault, and the report names it, too.
        """
        others = [region for region in self.regions if region.policy.offload and region not in regions]
        if any(region.ledger.movable_bytes or not region.ledger.forwards for region in others):
            for region in regions:
                logger.info("region %r: nothing to offload, its inputs are smaller than 4 KiB or weights", region.name)
            return []
        return [_nothing_to_offload(region.name) for region in regions]

    def _findings_about_kept(self, regions: list[WatchedRegion]) -> list[str]:
        """Note regions that keep nothing, and object only if no region does: of a hybrid model, some have attention."""
        if not any(region.ledger.kept_outputs for region in self.regions):
            return [_nothing_to_keep(region) for region in regions]
        if regions:
            self.warn_once(f"{_nothing_to_keep(regions[0])} ({len(regions)} such regions; others keep something)")
        return []

    def _findings_about_uncut(self) -> list[str]:
        """Object if no block that ran can ever be cut: of a model with towers, one may be of another kind."""
        ran = {region.name for region in self.regions if any(t.name == region.name and t.calls for t in region.tiles)}
        return [_cut_nowhere(*each) for each in self._uncut.items()] if ran <= self._uncut.keys() else []

    def _findings_about_model(self) -> list[str]:
        findings = [_read_elsewhere(*names) for names in self._caches.missed(self._reached)]
        findings += self._findings_about_uncut()
        replaced = self.find_replaced()
        if replaced:
            findings.append(_replaced(replaced))
        if self.loss is not None and not self.loss.calls and self.loss.name not in replaced:
            findings.append(
                f"tile(loss): expected {self.loss.name!r} to make the loss in tiles, and it did not. The model was "
                "called without labels or in evaluation mode, or computes its loss from different logits, as TRL's "
                "trainers do: pass labels, or make your own loss with lowtide.linear_cross_entropy and leave "
                "tile(loss) out"
            )
        return findings


def _nodes_behind(output: Any, first_node: int) -> Iterator[Node]:
    """Yield the nodes of the graph behind `output` that are not older than `first_node`."""
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


_COMPILED = -1
"""Stands for a backward of compiled autograd, which takes no callbacks: it is checked in the next forward."""

_ACCUMULATE_GRAD = 2**63
"""Nodes that accumulate a parameter's gradient have sequence numbers from here on, above those of all other nodes."""


def _saves_something(node: Node) -> bool:
    return any(bool(getattr(node, name)) for name in saved_fields(type(node)))


def _missing_effects(region: WatchedRegion) -> list[str]:
    """Describe what the policy says about `region` and the counts do not show."""
    ledger, policy = region.ledger, region.policy
    found = []
    if policy.recompute and ledger.recomputes == 0:
        found.append(
            f"region {ledger.name!r}: expected a recompute in backward, saw {ledger.forwards} forwards and no "
            "recompute. Something inside it keeps its own graph: choose smaller regions with regions=[...]"
        )
    if policy.offload and ledger.movable_bytes == 0 and ledger.nested:
        found.append(_inside_another(ledger.name))
    elif policy.offload and ledger.movable_bytes == 0 and not region.is_too_small:
        found.append(
            f"region {ledger.name!r}: expected its saved tensors to be offloaded, saw none that could be: "
            f"{ledger.saved_bytes} bytes stay on the device. {_why_not_movable(ledger)}, or set the policy of this "
            "region to 'recompute'"
        )
    if region.tiles and not any(tiled.calls for tiled in region.tiles):
        names = ", ".join(tiled.name for tiled in region.tiles)
        found.append(
            f"region {ledger.name!r}: expected {names} to run in tiles, saw no call. Something bypasses the forward: "
            "apply the policy after whatever replaces it, or leave tile(mlp) out"
        )
    return found


def _why_not_movable(ledger: RegionLedger) -> str:
    if ledger.unmovable_bytes:
        return (
            f"{ledger.unmovable_bytes} bytes are in tensors that cannot be moved as a run of bytes (a tensor subclass, "
            "a sparse layout, a small part of a large tensor): pass plain tensors"
        )
    return "Its inputs are hidden in an object of an unknown kind, or are not among its arguments: pass them as tensors"


def _nothing_to_offload(name: str) -> str:
    return (
        f"region {name!r}: expected its saved tensors to be offloaded, and all of them are smaller than 4 KiB or "
        "weights, as in every other region: the policy's offload does nothing for this model at this size. Use "
        "'recompute', or a longer batch"
    )


def _cut_nowhere(name: str, reason: str) -> str:
    return (
        f"region {name!r}: expected it to run in tiles with its attention, and {reason}. Leave tile(attention) out, or "
        "write 'tile', which leaves such blocks alone"
    )


def _nothing_to_keep(region: WatchedRegion) -> str:
    keeping = region.keeping
    if keeping is not None and keeping.changed:
        what = ", ".join(sorted(keeping.changed))
        why = f"it changes what {what} returned in place, so that everything is recomputed"
    else:
        seen = sorted(keeping.seen.items(), key=lambda pair: -pair[1])[:6] if keeping is not None else []
        most = ", ".join(f"{name} ({count})" for name, count in seen)
        called = f"It called {most}" if most else "It called no operator that could be seen: is it compiled?"
        why = f"it called no such operator, so that everything is recomputed. {called}"
    return (
        f"region {region.name!r}: expected to keep {' and '.join(region.policy.keep)}, and {why}. Name one of its "
        "operators in keep=[...], or leave keep= out"
    )


_SWITCH_OFF = (
    "switch that off (gradient_checkpointing=False, where a trainer switches it on after the policy was applied), or "
    "apply the policy after it, as LowtideCallback does"
)


def _inside_another(name: str) -> str:
    return (
        f"region {name!r}: expected its saved tensors to be offloaded, but it ran inside another checkpoint, which "
        f"keeps the inputs itself: {_SWITCH_OFF}"
    )


def _recomputed_twice(region: WatchedRegion) -> str:
    kept = f", and {' and '.join(region.policy.keep)} is not kept" if region.policy.keep else ""
    return f"region {region.name!r} ran inside another checkpoint, so it is recomputed twice{kept}: {_SWITCH_OFF}"


def _rerun_in_backward(region: WatchedRegion) -> str:
    return (
        f"region {region.name!r} ran inside a backward: a reentrant checkpoint around it (use_reentrant=True) runs it "
        f"there, and the policy recomputes it once more, as it does every region in that checkpoint: {_SWITCH_OFF}"
    )


def _replaced(names: list[str]) -> str:
    """Say which modules are no longer those that the policy was put on."""
    return (
        f"{_some(names)} {'was' if len(names) == 1 else 'were'} replaced after the policy was applied, and what is "
        "there now runs without it (a copy of a layer, or a head of resize_token_embeddings): apply the policy again, "
        "or after that change"
    )


def _grouped(findings: list[str]) -> list[str]:
    """Join findings that say the same about several regions: 36 layers give one line, with the first one's figures."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for finding in findings:
        match = _ABOUT_REGION.match(finding)
        name = match["name"] if match else ""
        groups.setdefault(_NUMBER.sub("", finding.replace(name, "") if name else finding), []).append((name, finding))
    return [
        first if len(same) == 1 or not name else f"{first} ({len(same) - 1} more such regions, to {same[-1][0]!r})"
        for same in groups.values()
        for name, first in same[:1]
    ]


_ABOUT_REGION = re.compile(r"region '(?P<name>[^']+)'")
_NUMBER = re.compile(r"\d+")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""  # noqa: PLR2004
    return ", ".join(map(repr, names[:2])) + rest


def _ran_in_evaluation(name: str) -> str:
    return (
        f"region {name!r} ran in evaluation mode, where a policy does nothing, and backward reached it. Call "
        "model.train() before training (from_pretrained returns models in evaluation mode), or leave the region out "
        f"with a rule: '{name}: none'"
    )


def _differentiated_by_model(name: str) -> str:
    return (
        f"region {name!r} ran without gradients in forward, and gradients arrive at its parameters. The model "
        "differentiates it with code of its own (reversible layers, an autograd.Function), where nothing is saved that "
        "could be recomputed or offloaded: choose different regions with regions=[...], or leave this model as it is"
    )


def _read_elsewhere(name: str, other: str) -> str:
    return (
        f"region {name!r}: its key-value cache was dropped, as caches are in training, and {other!r} continues from "
        "that cache: the model computes something else without it. Choose regions that take no cache with regions=[...]"
    )
