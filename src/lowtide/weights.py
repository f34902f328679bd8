"""Notes the weights that a forward uses, so that running it again uses the same ones, unchanged.

Autograd refuses a weight that was changed in place after it was saved. What is recomputed saves none: it reads whatever
its module holds by then. So the weights are noted when the forward runs, and a recompute

- is refused if it uses one that was modified since: by an optimizer between two backwards, by `weight.data = ...`, or
  by the forward itself;
- uses the tensors that the forward used, where the module holds other ones by now: those of
  `torch.func.functional_call` are gone again, and a parameter may have been replaced.

A module may hold a weight that a call of it does not use: a shared block's adapter for another layer, a shared expert
that no token chose. An optimizer that acts in backward steps such a weight as soon as its other uses are through, which
may be before this call is run again. So what counts is the use: of changed weights, every operator is watched, and
every tensor that is saved. (A recompute ends as the last one is saved, before its operator is called.)

Weights that somebody gathers for each use (FSDP's and ZeRO-3's shards) are left to them. `weight.data.mul_(...)` counts
as no change in torch, and nobody sees it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lowtide._torch import (
    FSDP1_MARK,
    TorchDispatchMode,
    has_compiled_code,
    is_functorch_wrapped,
    parts_of,
    pytree,
    storage_key,
    version_if_any,
    version_of,
    with_parameters,
)
from lowtide.errors import InPlaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    RefuseSaved = Callable[[torch.Tensor], None]


class Weight(NamedTuple):
    """A weight as it was in forward, and the dictionary in which a module holds it.

    So are tensors that a module computes with and that are no weights: a large buffer, a mask in an attribute.
    """

    held_by: MutableMapping[Any, Any]
    name: str
    tensor: torch.Tensor
    version: int
    storage: int | None
    """What identifies its memory; None for kinds of tensors whose memory may come and go."""
    requires_grad: bool
    kind: str = "weight"
    """What an error calls it."""


def weights_of(module: nn.Module, *, called: bool) -> list[Weight]:
    """Return the weights that are always there, in `module` and its parts: not those that FSDP or ZeRO-3 gather.

    `called` says that the module itself will be called, hooks included, and not its forward from within the hooks.
    """
    return weights_in(parts_of([module]), skip_first=not called)


def weights_in(parts: list[nn.Module], *, skip_first: bool) -> list[Weight]:
    """Return the weights that these parts hold, the first of which is looked at however it gathers its own."""
    if "torch.distributed.fsdp" in sys.modules and (gathered := _gathered_parts(parts[skip_first:])):
        parts = [part for part in parts if part not in gathered]
    found = []
    for held_by in with_parameters(parts):
        for name, weight in held_by.items():
            if weight is None or (weight.__dict__ and is_gathered(weight)):
                continue
            try:
                version = version_of(weight)
            except RuntimeError:  # an inference tensor has none
                version = 0
            storage = storage_key(weight.untyped_storage()) if type(weight) is nn.Parameter else _storage(weight)
            found.append(_weight(Weight, (held_by, name, weight, version, storage, weight.requires_grad, "weight")))
    return found


def watched(name: str, tensor: torch.Tensor, kind: str) -> Weight:
    """Return a tensor that is no weight in the form of one: whoever put it back watches its contents with that.

    It is held without its graph.
    """
    kept = tensor if tensor.grad_fn is None else tensor.detach()
    version, storage = version_if_any(tensor), _storage(tensor)
    return Weight({name: kept}, name, kept, version, storage, kept.requires_grad, kind)


_weight = tuple.__new__
"""Makes a `Weight` in half the time: regions do it for each of their weights, at each call."""


def without_moved(weights: list[Weight]) -> list[Weight]:
    """Return the weights after their forward. One whose data moved meanwhile may move again: its hooks know why."""
    for _, _, tensor, _, storage, _, _ in weights:
        if storage is not None and storage_key(tensor.untyped_storage()) != storage:
            return [
                w if w.storage is None or _storage(w.tensor) == w.storage else w._replace(storage=None) for w in weights
            ]
    return weights


def is_partitioned(weight: torch.Tensor) -> bool:
    """Return whether DeepSpeed ZeRO-3 partitions a weight: it marks those that it gathers in hooks."""
    return "ds_id" in weight.__dict__


def is_zero3_sharded(weight: torch.Tensor) -> bool:
    """Return whether ZeRO-3 holds a weight in shards right now, not gathered for a module that runs."""
    return is_partitioned(weight) and not weight.ds_active_sub_modules  # type: ignore[attr-defined]


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether a module is one of FSDP1's wrappers."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, FullyShardedDataParallel)


def _changed(weights: list[Weight]) -> list[Weight]:
    """Return the weights whose contents are not those of the forward, as far as torch knows."""
    return [
        weight
        for weight in weights
        if version_if_any(weight.tensor) != weight.version
        or (weight.storage is not None and _storage(weight.tensor) != weight.storage)
    ]


_CANNOT_TELL = " (whether it is used cannot be seen, because this program compiles code)"


_BROADCASTS = {"buffer": " (under DDP: broadcast_buffers=False)"}


def _refusal(weight: Weight, name: str, remark: str = "") -> InPlaceError:
    version, what = version_if_any(weight.tensor), f"{weight.name!r} of shape {tuple(weight.tensor.shape)}"
    if weight.kind != "weight":
        return InPlaceError(
            f"{name}: the {weight.kind} {what} was modified by an inplace operation between forward and backward, and "
            f"running the forward again would read what it holds now{remark}. Change it after backward, or put another "
            f"tensor in its place{_BROADCASTS.get(weight.kind, '')}"
        )
    if version != weight.version:
        return InPlaceError(
            f"{name}: the weight {what} was modified by an inplace operation between forward and backward, or by the "
            f"forward itself (it was at version {weight.version} and is now at version {version}){remark}. Update "
            "weights after backward: call backward for all losses of a forward before optimizer.step(), or run the "
            "forward again after it"
        )
    return InPlaceError(
        f"{name}: the weight {what} was given other data (weight.data = ...) between forward and backward"
        f"{remark}. Do that after backward, or before the forward"
    )


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses the first operator that reads or writes one of these weights, whatever it is reached by.

    Views are none yet: what is done with them is.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: list[Weight], name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {_storage(weight.tensor): weight for weight in weights}
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = self._weights_among((args, kwargs))
        if used and not getattr(func, "is_view", False):
            raise _refusal(used[0], self._name)
        result = func(*args, **(kwargs or {}))
        if used and not self._weights_among(result):  # it may return a view, and has copied instead
            raise _refusal(used[0], self._name)
        return result

    def refuse_saved(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that is saved for backward, if it is one of these weights or a view of it."""
        if used := self._weights_among(tensor):
            raise _refusal(used[0], self._name)

    def _weights_among(self, values: Any) -> list[Weight]:
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        return [self._weights[key] for key in map(_storage, strided) if key in self._weights]


def are_as_noted(weights: list[Weight]) -> bool:
    """Return whether the module holds the weights that were noted, and nothing about them has changed."""
    for held_by, name, tensor, version, storage, requires_grad, _ in weights:
        if held_by.get(name) is not tensor or tensor.requires_grad is not requires_grad:
            return False
        if storage is not None and storage_key(tensor.untyped_storage()) != storage:
            return False
        try:
            if version_of(tensor) != version:
                return False
        except RuntimeError:  # an inference tensor has none
            continue
    return True


@contextlib.contextmanager
def replaced_weights(weights: list[Weight], tensors: list[torch.Tensor]) -> Iterator[None]:
    """Put other tensors in the places of a module's weights inside, and what was there back afterwards."""
    before = [weight.held_by.get(weight.name, _MISSING) for weight in weights]
    try:
        for weight, tensor in zip(weights, tensors, strict=True):
            weight.held_by[weight.name] = tensor
        yield
    finally:
        for weight, tensor in zip(weights, before, strict=True):
            if tensor is _MISSING:
                del weight.held_by[weight.name]
            else:
                weight.held_by[weight.name] = tensor


@contextlib.contextmanager
def as_in_forward(weights: list[Weight], name: str, *, sees_saved: bool = True) -> Iterator[RefuseSaved | None]:
    """Let a module use inside the weights that were noted, each trainable or frozen as it was.

    A use of one whose contents have changed is refused. If there are any, it hands out a function that must be called
    for each tensor that is saved inside. A change is enough where nobody can tell what is used: if the caller does not
    see what is saved, of compiled code, and of other kinds of weights.
    """
    changed = _changed(weights)
    is_seen = sees_saved and not has_compiled_code() and all(weight.storage is not None for weight in changed)
    if changed and not is_seen:
        raise _refusal(changed[0], name, _CANNOT_TELL if has_compiled_code() else "")
    elsewhere = [weight for weight in weights if weight.held_by.get(weight.name) is not weight.tensor]
    flipped = [weight for weight in weights if weight.tensor.requires_grad is not weight.requires_grad]
    with replaced_weights(elsewhere, [weight.tensor for weight in elsewhere]):
        try:
            for weight in flipped:
                weight.tensor.requires_grad_(weight.requires_grad)
            if not changed:
                yield None
                return
            with _Uses(changed, name) as uses:
                yield uses.refuse_saved
        finally:
            for weight in flipped:
                weight.tensor.requires_grad_(not weight.requires_grad)


_MISSING = object()


@functools.cache
def _gathering_kinds() -> tuple[type, ...]:
    """Return the classes of modules that gather their weights when they are called: FSDP2's and FSDP1's."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return FSDPModule, FullyShardedDataParallel


def _gathered_parts(parts: list[nn.Module]) -> set[nn.Module] | None:
    """Return the parts whose weights are gathered when a module among `parts` is called; None if there are none."""
    kinds = _gathering_kinds()
    for part in parts:
        if isinstance(part, kinds):
            return {inner for part in parts if isinstance(part, kinds) for inner in part.modules()}
    return None


def is_gathered(weight: torch.Tensor) -> bool:
    """Return whether a weight is in shards between its uses, ZeRO-3's or FSDP1's."""
    marks = weight.__dict__
    return bool(marks) and ("ds_id" in marks or FSDP1_MARK in marks)


def _storage(weight: torch.Tensor) -> int | None:
    """Return what identifies a weight's memory. Quantized and distributed tensors replace theirs as they see fit."""
    kind = type(weight)
    if kind is nn.Parameter or (kind is torch.Tensor and not is_functorch_wrapped(weight)):
        return storage_key(weight.untyped_storage())
    return None
