"""Defines what a store is: it takes a tensor and returns a `Stored`, an object that the autograd graph owns.

A store keeps no list of what it holds. A `Stored` dies with the graph that it belongs to, and frees its bytes then; so
two forwards before a backward, `retain_graph`, a skipped backward and exceptions need no bookkeeping.

The life of a `Stored`: `put` holds the tensor itself; `start` begins the copy away; `release` gives the device memory
back; `prefetch` begins the copy back; `get` returns the tensor. Nobody but the caller keeps alive what `get` returned,
but as long as someone uses it, the next `get` returns the same memory (`WeakTensor`): several views are fetched once.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, NoReturn

from lowtide._torch import StorageWeakRef, tensor_from

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskUsage:
    """The figures of a store's files: how much they hold, and how they are read and written."""

    directory: str
    bytes: int
    peak_bytes: int
    limit: int
    """The most bytes that this process may hold."""
    written_bytes: int
    read_bytes: int
    direct: bool
    """Whether I/O bypasses the page cache (O_DIRECT). If not, it is buffered, and the cache is told to forget it."""
    verify: bool
    """Whether every block that is read is compared with its checksum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """The figures of a store: what it holds, what it has held at most, and how long compute waited for it."""

    host_bytes: int = 0
    peak_host_bytes: int = 0
    pageable_bytes: int = 0
    """Bytes of host memory that should have been pinned and could not be."""
    seconds_waited: float = 0.0
    disk: DiskUsage | None = None


class Stored(abc.ABC):
    """One tensor in a store. It belongs to the autograd graph, and frees its bytes when it dies."""

    nbytes: int
    """The bytes that leave the device."""

    @abc.abstractmethod
    def start(self) -> bool:
        """Begin to copy the bytes away; until then the tensor itself is held. Return False if there is no room."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give the device memory back once it is copied: the stream that owns it waits for that, the host does not."""

    @abc.abstractmethod
    def prefetch(self) -> None:
        """Begin to bring the bytes back, because backward will need them next."""

    @abc.abstractmethod
    def get(self) -> torch.Tensor:
        """Return the flat tensor, ready for the current stream. The store does not keep it alive."""

    @abc.abstractmethod
    def take_fetched(self) -> int:
        """Return the bytes that were brought back since the last call of this method."""

    @property
    @abc.abstractmethod
    def is_away(self) -> bool:
        """Return whether the device memory has been given back."""


class Store(abc.ABC):
    """A place where saved tensors wait for backward, with its limits."""

    name: str
    takes_host_tensors = False
    """Whether storing a tensor that is in host memory already frees anything."""

    @abc.abstractmethod
    def require_useful(self, tensor: torch.Tensor, region: str) -> None:
        """Raise `OffloadError` if storing a tensor like this one, which `region` saved, would free nothing."""

    @abc.abstractmethod
    def put(self, raw: torch.Tensor) -> Stored:
        """Take a flat, contiguous tensor. Nothing is copied before `Stored.start`."""

    @property
    @abc.abstractmethod
    def bytes_used(self) -> int:
        """Return the bytes that are held now."""

    @property
    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes that were ever held."""

    @property
    @abc.abstractmethod
    def seconds_waited(self) -> float:
        """Return how long compute has waited for copies so far. Asking waits for the device."""

    @abc.abstractmethod
    def usage(self) -> Usage:
        """Return all figures at once, for a report. Asking waits for the device."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, because it holds memory and streams of this process: "
            "pickle the policy, and apply it again in the other process"
        )


class WeakTensor:
    """A weak reference to a flat tensor: it finds the memory again as long as someone else uses it."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._storage = StorageWeakRef(raw.untyped_storage())  # type: ignore[no-untyped-call]
        self._like = (raw.dtype, raw.device, int(raw.storage_offset()), raw.numel())

    def get(self) -> torch.Tensor | None:
        """Return the tensor if its memory is still in use, else None."""
        return tensor_from(self._storage, self._like)
