"""What a store is: it takes a tensor and gives back an object that the autograd graph owns.

The store keeps no list of what it holds. A `Stored` dies with the graph that it belongs to, and returns its bytes
then; so two forwards before a backward, `retain_graph`, a skipped backward and exceptions need no bookkeeping.

Bytes that are back, known only as long as somebody else uses them: several views of them are fetched once.
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
    """What a store keeps in files, and how."""

    directory: str
    bytes: int
    peak_bytes: int
    limit: int
    """The most bytes for this process."""
    written_bytes: int
    read_bytes: int
    direct: bool
    """Whether the page cache is bypassed (O_DIRECT). Else I/O is buffered, and the cache is told to forget."""
    verify: bool
    """Whether every block is compared with its checksum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a store holds and has held."""

    host_bytes: int = 0
    peak_host_bytes: int = 0
    pageable_bytes: int = 0
    """Bytes of host memory that could not be pinned."""
    seconds_waited: float = 0.0
    disk: DiskUsage | None = None


class Stored(abc.ABC):
    """One tensor in a store."""

    nbytes: int
    """Bytes that leave the device."""

    @abc.abstractmethod
    def start(self) -> bool:
        """Begin to move the bytes away. Until then the tensor itself is held. False: there is no room, it stays."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give the device memory back: the stream that owns it waits for the copy, the host does not."""

    @abc.abstractmethod
    def prefetch(self) -> None:
        """Begin to bring the bytes back, because they will be needed next."""

    @abc.abstractmethod
    def get(self) -> torch.Tensor:
        """The flat tensor, ready for the current stream. The store does not keep it alive."""

    @abc.abstractmethod
    def take_fetched(self) -> int:
        """Bytes that were brought back since this was last asked."""

    @property
    @abc.abstractmethod
    def is_away(self) -> bool:
        """Whether the device memory has been given back."""


class Store(abc.ABC):
    """A place for saved tensors, with its limits."""

    name: str
    takes_host_tensors = False
    """Whether it frees anything to put a tensor here that is in host memory."""

    @abc.abstractmethod
    def require_useful(self, tensor: torch.Tensor) -> None:
        """Raise if this store can do nothing for a tensor of this kind, wherever it comes from."""

    @abc.abstractmethod
    def put(self, raw: torch.Tensor) -> Stored:
        """Take a flat, contiguous tensor. Nothing moves yet."""

    @property
    @abc.abstractmethod
    def bytes_used(self) -> int:
        """Bytes held now."""

    @property
    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """The most bytes ever held."""

    @property
    @abc.abstractmethod
    def seconds_waited(self) -> float:
        """How long compute waited for copies so far. Asking waits for the device."""

    @abc.abstractmethod
    def usage(self) -> Usage:
        """All figures at once, for a report. Asking waits for the device."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} holds memory and streams of this process and cannot be pickled: "
            "pickle the policy, and apply it again in the other process"
        )


class WeakTensor:
    """A weak reference to a flat tensor."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._storage = StorageWeakRef(raw.untyped_storage())  # type: ignore[no-untyped-call]
        self._like = (raw.dtype, raw.device, int(raw.storage_offset()), raw.numel())

    def get(self) -> torch.Tensor | None:
        """Return the tensor, if it is still in use."""
        return tensor_from(self._storage, self._like)
