"""The disk tier: saved tensors wait in a private file.

A tensor's memory is given back only when its bytes are written, so a write that fails loses nothing: the step ends with
an error in forward, and no gradient is computed from bytes that are not there. What is read back is complete, and
compared with its checksum if `verify` says so, before anybody sees it.

It works with the model on an accelerator (through pinned buffers), and with the model on the CPU, where it frees memory
of the process. Threads move the bytes; compute waits for them only if the disk is slower than one region's forward, or
one region's backward.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from lowtide.errors import InvalidValueError, StoreError
from lowtide.stores.base import DiskUsage, Store, Stored, Usage, WeakTensor
from lowtide.stores.files import Block, Load, Save, ScratchFile, Workers, free_bytes, in_blocks
from lowtide.stores.host import record_streams
from lowtide.stores.host_memory import PAGE, page_aligned, round_up
from lowtide.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.stores.files import Transfer

BLOCK_BYTES = 2 * 1024**2
THREADS = 4
"""With these defaults the buffers take 8 MiB of host memory. While some threads copy, others are in a system call."""


class _Resources(NamedTuple):
    """The file and the threads of one process: a forked child must not use its parent's."""

    process: int
    file: ScratchFile
    workers: Workers


class DiskStore(Store):
    """A private file in `directory`, up to `limit` bytes for this process (a number, or a string such as `"200GiB"`).

    Without a limit the process may use its share of what is free now: the processes that torchrun started on this node
    (`LOCAL_WORLD_SIZE`) share it equally. `verify` compares all that is read with a checksum. `tmpfs` allows a
    directory in memory. `threads` move blocks of `block` bytes, and hold one such buffer each.
    """

    __module__ = "lowtide"

    name = "disk"
    takes_host_tensors = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        limit: int | str | None = None,
        verify: bool = False,
        tmpfs: bool = False,
        threads: int = THREADS,
        block: int | str = BLOCK_BYTES,
    ) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self.verify = verify
        self.block = parse_bytes(block)
        self._tmpfs, self._threads = tmpfs, threads
        if threads < 1 or self.block < PAGE or self.block % PAGE:
            raise InvalidValueError(
                f"a disk store needs at least 1 thread, and a block size that is a multiple of {PAGE} bytes, got "
                f"threads={threads} and block={self.block}"
            )
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._wanted = None if limit is None else parse_bytes(limit)
        self._resources = self._new_resources()

    def _new_resources(self) -> _Resources:
        file = ScratchFile(self.directory, 0, tmpfs=self._tmpfs)
        file.limit = fair_share(self.directory, self._wanted)
        return _Resources(os.getpid(), file, Workers(self._threads))

    @property
    def resources(self) -> _Resources:
        """Return this process's file and threads; a forked child gets new ones."""
        if self._resources.process != os.getpid():
            self._lock = threading.Lock()  # the parent's may have been held when the process was forked
            self._resources = self._new_resources()
        return self._resources

    def require_useful(self, tensor: torch.Tensor, region: str) -> None:
        """Accept any tensor: writing it to a disk frees its memory wherever it is."""

    def put(self, raw: torch.Tensor) -> Stored:
        return DiskStored(self, raw.nbytes, raw.dtype, raw.device, raw)

    @property
    def bytes_used(self) -> int:
        return self.resources.file.used

    @property
    def peak_bytes(self) -> int:
        return self.resources.file.peak

    @property
    def seconds_waited(self) -> float:
        return self._seconds

    def usage(self) -> Usage:
        _, file, workers = self.resources
        disk = DiskUsage(
            directory=str(self.directory),
            bytes=file.used,
            peak_bytes=file.peak,
            limit=file.limit,
            written_bytes=file.written,
            read_bytes=file.read_back,
            direct=file.direct,
            verify=self.verify,
        )
        return Usage(
            host_bytes=workers.staging.bytes,
            peak_host_bytes=workers.staging.peak,
            pageable_bytes=workers.staging.pageable_bytes,
            seconds_waited=self.seconds_waited,
            disk=disk,
        )

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count how long the code inside takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - start


def fair_share(directory: Path, limit: int | None) -> int:
    """Return the most bytes that this process may use; there must be room now for all processes of this node."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = free_bytes(directory)
    if limit is None:
        return free // ranks
    if limit * ranks > free:
        each = f" for each of {ranks} processes on this node" if ranks > 1 else ""
        raise StoreError(
            f"disk store: the limit of {format_bytes(limit)}{each} is more than the {format_bytes(free)} that are free "
            f"in {directory}. Remedy: lower the limit, free some space, or name another directory"
        )
    return limit


class _Fetch(NamedTuple):
    """Bytes that are being read back."""

    raw: torch.Tensor
    transfer: Transfer


class DiskStored(Stored):
    """One tensor of a disk store: in memory, being written, in the file, or being read back."""

    _is_constructed = False  # an interrupt may come while it is constructed

    def __init__(
        self, store: DiskStore, nbytes: int, dtype: torch.dtype, device: torch.device, raw: torch.Tensor | None
    ) -> None:
        self._store, self._resources = store, store.resources
        self._raw = raw
        """The tensor, until it is written. None from the start if the host tier holds the bytes meanwhile."""
        self._dtype, self._device = dtype, device
        self._owner = _current_stream(device)
        self._blocks: list[Block] = []
        self._writing: Transfer | None = None
        self._fetch: _Fetch | None = None
        self._restored: WeakTensor | None = None
        self._fetched = 0
        self._was_fetched = False
        self.nbytes = nbytes
        self._is_constructed = True

    @property
    def is_away(self) -> bool:
        return self._raw is None

    def start(self) -> bool:
        if self._writing is not None or self._raw is None:
            return True
        if self._is_forked:
            return False
        ready = None if self._owner is None else self._owner.record_event()
        return self.write([self._raw], ready)

    def write(self, sources: list[torch.Tensor], ready: torch.Event | None) -> bool:
        """Begin to write these flat tensors once `ready` has occurred. Return False if there is no room."""
        parts = [part for source in sources for part in in_blocks(source, self._store.block)]
        extents = self._resources.file.allocate([part.nbytes for part in parts])
        if extents is None:
            return False
        self._blocks = [
            Block(self._resources.file, extent, part.nbytes) for extent, part in zip(extents, parts, strict=True)
        ]
        staging, verify = self._resources.workers.staging, self._store.verify
        self._writing = self._resources.workers.run(
            [Save(staging, *pair, ready, verify=verify) for pair in zip(self._blocks, parts, strict=True)]
        )
        return True

    def wait_until_written(self) -> None:
        """Wait until the bytes are in the file, if a write has begun. Raise the error of a write that failed."""
        if self._writing is not None:
            try:
                with self._store.waiting():
                    self._writing.wait()
            except Exception:
                self._writing = None  # nothing is lost: another `start` tries again
                raise

    def release(self) -> None:
        if self._writing is None or self._raw is None or self._is_forked:
            return
        self.wait_until_written()
        if self._owner is not None:
            record_streams(self._raw, self._owner)
        self._raw = None

    def prefetch(self) -> None:
        if self._raw is None and self._fetch is None and not self._was_fetched and not self._is_forked:
            with contextlib.suppress(torch.OutOfMemoryError):  # this was only early: `get` fetches it, or raises
                self._fetch = self._start_fetch()

    def get(self) -> torch.Tensor:
        if self._raw is not None:
            return self._raw
        if self._is_forked:
            raise StoreError(
                f"disk store in {self._store.directory}: {format_bytes(self.nbytes)} were saved by process "
                f"{self._resources.process}, and this process, {os.getpid()}, was forked from it and does not have its "
                "threads. Remedy: run forward and backward in the same process"
            )
        raw = None if self._restored is None else self._restored.get()
        if raw is None:
            raw = self._finish_fetch()
        if (current := _current_stream(self._device)) is not None:
            raw.record_stream(current)  # another stream may have allocated it; where none has, this does nothing
        return raw

    def take_fetched(self) -> int:
        fetched, self._fetched = self._fetched, 0
        return fetched

    def _finish_fetch(self) -> torch.Tensor:
        fetch = self._fetch or self._start_fetch()
        try:
            with self._store.waiting():
                fetch.transfer.wait()
        finally:
            self._fetch = None  # a failure is raised once, and the next `get` tries again
        self._restored = WeakTensor(fetch.raw)
        return fetch.raw

    def _start_fetch(self) -> _Fetch:
        sizes = [block.size for block in self._blocks]
        if self._device.type == "cpu":
            memory = page_aligned(round_up(self.nbytes))
            raw, parts = memory[: self.nbytes].view(self._dtype), _split_in_pages(memory, sizes)
            ready = None
        else:
            raw = torch.empty(self.nbytes // self._dtype.itemsize, dtype=self._dtype, device=self._device)
            parts = list(torch.split(raw.view(torch.uint8), sizes))
            stream = torch.accelerator.current_stream(self._device)
            ready = stream.record_event()  # a kernel that still runs may use the memory that was just allocated
        self._was_fetched = True
        self._fetched += self.nbytes
        staging = self._resources.workers.staging
        tasks = [Load(staging, block, part, ready) for block, part in zip(self._blocks, parts, strict=True)]
        del parts
        return _Fetch(raw, self._resources.workers.run(tasks))

    @property
    def _is_forked(self) -> bool:
        """Return whether this process was forked from the one that stored the tensor, whose threads move it."""
        return self._resources.process != os.getpid()

    def __del__(self) -> None:
        """Cancel what has not begun when the graph dies. Tasks that have begun hold what they need, and finish."""
        if not self._is_constructed or self._is_forked:
            return
        if self._writing is not None:
            self._writing.cancel()
        if self._fetch is not None:
            self._fetch.transfer.cancel()


def _current_stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def _split_in_pages(memory: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Split memory into each block's whole pages: all blocks but the last are whole pages already."""
    return list(torch.split(memory, [round_up(size) for size in sizes]))
