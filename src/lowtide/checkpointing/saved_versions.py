"""Refuses a gradient from a tensor that its region changes in place after autograd has saved it.

Plain autograd notes the version of each tensor that it saves, and refuses one that has another when backward asks for
it. Hooks take that check away, and torch's checkpoint has no other: what it recomputes is handed out with all that the
rest of the recompute wrote to it. So a recompute notes the version of each tensor as it is saved, and it is compared
when the tensor is handed out.

What is refused here, plain autograd refuses, too. The reverse does not hold: a recompute ends with the last tensor that
is saved, and does not repeat what the region changes after that. The tensor then holds what was saved, its gradient is
right, and it is handed out. With `early_stop=False` everything is repeated, and both refuse the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import (
    aliases_parameter,
    checkpoint_hooks,
    graph_break,
    like_hook,
    push_hooks,
    storage_key,
    version_of,
)
from lowtide.errors import InPlaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lowtide.counters import RegionLedger
    from lowtide.weights import RefuseSaved

    Pack = Callable[[torch.Tensor], Any]
    Unpack = Callable[[Any], torch.Tensor]


def check_handed_out(region: str, versions: dict[int, int]) -> bool:
    """Let what the forward saves from now on be compared with `versions` when backward asks for it.

    Returns whether it put hooks in force: the caller ends them (`pop_hooks`).
    """
    hooks = checkpoint_hooks()
    if hooks is None:  # a context of the user's has hooks of its own, and the checkpoint's see nothing
        return False
    push_hooks(hooks[0], functools.partial(hand_out, region, versions, hooks[1]))
    return True


class SavedBytes:
    """Counts the bytes of what a recompute saves, each memory once; then asks `refuse_saved`.

    Weights do not count, nor what was there before the recompute: the region's inputs, and outputs that it has kept.
    """

    def __init__(self, ledger: RegionLedger, refuse_saved: RefuseSaved | None, inputs: Iterable[torch.Tensor]) -> None:
        self._ledger = ledger
        self._refuse_saved = refuse_saved
        self._seen: set[int] = set()
        self.leave_out(inputs)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the memory of these tensors. A wrapper of other tensors has none."""
        self._seen.update(storage_key(tensor.untyped_storage()) for tensor in tensors if type(tensor) is torch.Tensor)

    def __call__(self, tensor: torch.Tensor) -> None:
        if self._refuse_saved is not None:
            self._refuse_saved(tensor)
        if type(tensor) is not torch.Tensor or aliases_parameter(tensor):  # a parameter, or a wrapper of other tensors
            return
        key = storage_key(tensor.untyped_storage())
        if key not in self._seen:  # what is saved lives at least as long as the recompute
            self._seen.add(key)
            self._ledger.inner_bytes += tensor.nbytes


def note_saved(versions: dict[int, int], refuse_saved: RefuseSaved | None = None) -> bool:
    """Note in `versions`, by identity, the version of each tensor that a recompute saves from now on.

    Each is shown to `refuse_saved` first, if weights have changed. Returns whether it put hooks in force: the caller
    ends them (`pop_hooks`).
    """
    hooks = checkpoint_hooks()
    if hooks is None:
        return False
    push_hooks(like_hook(functools.partial(_note, versions, hooks[0], refuse_saved), hooks[0]), hooks[1])
    return True


@graph_break("this is Lowtide's own work, and no part of a graph")  # as is what it calls, torch's hook
def _note(versions: dict[int, int], pack: Pack, refuse_saved: RefuseSaved | None, tensor: torch.Tensor) -> Any:
    """Note the version of a tensor as it is saved, and let the checkpoint keep it."""
    if refuse_saved is not None:
        refuse_saved(tensor)
    version = version_of(tensor)
    # Torch hands out the object that it is given, unless that has a graph. Saved again, changed, it is another object.
    if tensor.requires_grad or versions.get(id(tensor), version) != version:
        tensor = tensor.detach()
    versions[id(tensor)] = version
    return pack(tensor)


def hand_out(region: str, versions: dict[int, int], unpack: Unpack, packed: Any) -> torch.Tensor:
    """Return what torch's checkpoint has recomputed, unless it was changed since it was saved."""
    tensor = unpack(packed)
    version = versions.get(id(tensor))
    if version is not None and version != version_of(tensor):
        raise InPlaceError(
            f"region {region!r}: a tensor needed for backward is modified by an inplace operation in the region "
            f"itself, after it was saved (it was at version {version} and is then at version {version_of(tensor)}). "
            "Modify a copy of it instead, for example x = x + 1 instead of x += 1"
        )
    return tensor
