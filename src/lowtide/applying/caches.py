"""Key-value caches: dropped in training, because a recomputed block would write to them twice, and refused where the
model needs what is in them.

Most models fill a cache in training only because nobody told them not to. Some do read it: a prefix that was computed
before (prefix tuning), or other layers that go on from it (PI0's action expert). Without the cache those compute
something else, so they are refused: a cache that holds something, at once; one that would have been filled for others,
by the guard after the first backward.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowtide._torch import pytree
from lowtide.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import nn

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Keywords under which models hand key-value caches to their blocks."""


def is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache") and hasattr(value, "update")


def places_of(module: nn.Module) -> set[int]:
    """The layers of a cache that a block writes to, by transformers' convention."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return {index for index in found if isinstance(index, int)}


def refuse_content(cache: Any, places: set[int], name: str) -> None:
    """Raise `CacheError` if a block would lose something with its cache."""
    if _holds_something(cache, places):
        raise CacheError(
            f"region {name!r} is given a key-value cache with content, and caches are dropped in training: the block "
            "would compute something else. Train without past_key_values, or name blocks that take none with "
            "regions=[...]"
        )


def _holds_something(cache: Any, places: set[int]) -> bool:
    if not is_cache(cache):
        return any(isinstance(leaf, Tensor) and leaf.numel() > 0 for leaf in pytree.tree_leaves(cache))
    return any(_length(cache, index) > 0 for index in places)


def _length(cache: Any, index: int) -> int:
    try:
        return int(cache.get_seq_length(index))
    except (AttributeError, TypeError, ValueError):  # a cache of states has no length
        return 0


@dataclasses.dataclass(frozen=True)
class _Dropped:
    region: str
    stack: str
    places: set[int]


class DroppedCaches:
    """Which blocks were to write to which caches. The caches are known weakly."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, dict[str, _Dropped]] = weakref.WeakKeyDictionary()
        self._shared: dict[str, str] = {}

    def note(self, cache: Any, places: set[int], name: str) -> None:
        """Two stacks that write to the same places of one cache: the second goes on from what the first wrote."""
        if not is_cache(cache):
            return
        writers = self._known.setdefault(cache, {})
        if name in writers:
            return
        new = _Dropped(name, name.rpartition(".")[0], places)
        for other in writers.values():
            if other.stack != new.stack and other.places & new.places:
                self._shared[other.region] = new.region
        writers[name] = new

    def missed(self, reached: Collection[str]) -> Iterator[tuple[str, str]]:
        """Blocks that backward did not come by, nor by any of their stack, each with one that shares its cache and that
        backward did come by: only the cache leads from the one to the other."""
        stacks = {name.rpartition(".")[0] for name in reached}
        for name, other in self._shared.items():
            if name.rpartition(".")[0] not in stacks and other.rpartition(".")[0] in stacks:
                yield name, other
