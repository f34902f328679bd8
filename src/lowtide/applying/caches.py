"""Key-value caches: dropped in training, and refused where the model needs what is in them.

A recomputed region would write to a cache twice. Most models fill one in training only because nobody told them not to;
but some do read it: a prefix that was computed before (prefix tuning), or layers of another stack that continue from it
(PI0's action expert). Without the cache those compute something else, so they are refused: a cache that holds
something, at once; one that would have been filled for another stack, by the guard after the first backward.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowtide._torch import pytree
from lowtide.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch import nn

CACHE_KEYWORDS = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Keywords under which models hand key-value caches to their layers."""


def is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache") and hasattr(value, "update")


def cache_layers(module: nn.Module) -> set[int]:
    """Return the layers of a cache that a region writes to, by transformers' `layer_idx`."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return {index for index in found if isinstance(index, int)}


def refuse_content(cache: Any, layers: set[int], name: str) -> None:
    """Raise `CacheError` if region `name` would lose something with its cache."""
    if _has_content(cache, layers):
        raise CacheError(
            f"region {name!r} is given a key-value cache with content, and caches are dropped in training: the region "
            "would compute something else. Train without past_key_values, or choose regions that take none with "
            "regions=[...]"
        )


def _has_content(cache: Any, layers: set[int]) -> bool:
    if not is_cache(cache):
        return any(isinstance(leaf, Tensor) and leaf.numel() > 0 for leaf in pytree.tree_leaves(cache))
    return any(_length(cache, index) > 0 for index in layers)


def _length(cache: Any, index: int) -> int:
    try:
        return int(cache.get_seq_length(index))
    except (AttributeError, TypeError, ValueError):  # a cache of states has no length
        return 0


@dataclasses.dataclass(frozen=True)
class _Writer:
    region: str
    layers: set[int]

    @property
    def stack(self) -> str:
        return _stack(self.region)


def _stack(region: str) -> str:
    return region.rpartition(".")[0]


class DroppedCaches:
    """Remembers which regions would have written to which caches. The caches are known weakly."""

    def __init__(self) -> None:
        self._writers: weakref.WeakKeyDictionary[Any, dict[str, _Writer]] = weakref.WeakKeyDictionary()
        self._consumers: dict[str, str] = {}
        """Regions whose cache is continued by another stack, each with a region of that stack."""

    def note(self, cache: Any, layers: set[int], name: str) -> None:
        """Take note that region `name` was given `cache`.

        If two stacks write to the same layers of one cache, the second continues from what the first wrote.
        """
        if not is_cache(cache):
            return
        writers = self._writers.setdefault(cache, {})
        if name in writers:
            return
        new = _Writer(name, layers)
        for earlier in writers.values():
            if earlier.stack != new.stack and earlier.layers & new.layers:
                self._consumers[earlier.region] = new.region
        writers[name] = new

    def missed(self, reached: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (region, consumer) pairs where backward reached the consumer's stack but not the region's.

        Only the cache leads from the one to the other, and it was dropped.
        """
        stacks = {_stack(name) for name in reached}
        for region, consumer in self._consumers.items():
            if _stack(region) not in stacks and _stack(consumer) in stacks:
                yield region, consumer


class CacheDropper:
    """Drops the key-value caches that a region or a block is given in training, and tells the guard about them."""

    def __init__(self, name: str, *, note: Callable[[Any, set[int], str], None], warn: Callable[[str], None]) -> None:
        self._name = name
        self._note = note
        self._warn = warn
        self._layers: set[int] | None = None
        """The layers of a cache that it writes to; known once it was given one."""

    def dropped(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace caches by None: they would be written to twice, and training has no use for one."""
        keywords = [name for name, value in kwargs.items() if holds_cache(name, value)]
        caches = [*(kwargs[name] for name in keywords), *filter(is_cache, args)]
        if not caches:
            return args, kwargs
        if self._layers is None:
            self._layers = cache_layers(module)
        for cache in caches:
            refuse_content(cache, self._layers, self._name)
            self._note(cache, self._layers, self._name)
        self._warn(f"key-value caches are dropped in training (first seen in {self._name})")
        return tuple(None if is_cache(arg) else arg for arg in args), {**kwargs, **dict.fromkeys(keywords)}


def holds_cache(name: str, value: Any) -> bool:
    """Return whether an argument of this name is a cache."""
    return value is not None and (name in CACHE_KEYWORDS or is_cache(value))
