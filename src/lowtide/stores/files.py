"""The file behind a disk store: the directory that it is made in, the file itself, and the threads that move bytes.

Activations are user data. So the directory is checked before anything is written to it; it is opened once and checked
through that handle, so that the directory that was checked is the one that is used. The file has no name from the start
(O_TMPFILE), or loses it at once: nothing outlives the process, however it ends. It is opened for direct I/O where the
file system allows it. Its space is divided into extents, reused, and given back when the store dies.

A tensor moves in blocks, each a task for one of a few threads. A thread has one staging buffer, page-aligned and used
for all its blocks (fresh memory is several times slower to touch), pinned if the tensors are on an accelerator. So the
host memory in use is threads x block size, however much is queued, and while one thread copies, another one is in a
system call. A task has let go of the tensor's memory before it reports that it is done: whoever waited for it may count
on that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import stat
import tempfile
import threading
import weakref
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowtide.errors import StoreError
from lowtide.stores.host import CopyStreamCache
from lowtide.stores.host_memory import PAGE, HostMemory, RangeAllocator, buffer_of, page_aligned, round_up
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lowtide.stores.host_memory import Extent

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that keep their files in memory: storing a tensor there would free nothing."""

_ROOT = 0
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_FLAGS = os.O_RDWR | os.O_CLOEXEC
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)

_REMEDIES = {
    errno.ENOSPC: "free some space there, name another directory, or lower the limit (limit=...)",
    errno.EDQUOT: "your quota is used up: name another directory, or lower the limit (limit=...)",
    errno.EMFILE: "the process has too many open files: close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has too many open files: close some, or raise fs.file-max",
    errno.ENOENT: "create it, with mode 0700, or name another one",
    errno.ENOTDIR: "name a directory",
    errno.EACCES: "name a directory that you may write to",
    errno.EPERM: "name a directory that you may write to",
    errno.EROFS: "name a directory on a disk that is mounted for writing",
    errno.EIO: "the disk fails: name a directory on another one",
}


def remedy(error: OSError) -> str:
    """Return what a user can do about a failed system call."""
    return _REMEDIES.get(error.errno or 0, "check the disk, or name another directory")


# --- The directory --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(directory: Path, *, tmpfs: bool) -> Iterator[int]:
    """Open a directory that may hold activations, or raise a `StoreError` that says why it may not."""
    refuse_foreign_links(directory)
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(
            f"disk store: {directory} cannot be used: {error.strerror}. Remedy: {remedy(error)}"
        ) from error
    try:
        refuse_unfit(directory, os.fstat(handle), tmpfs=tmpfs)
        yield handle
    finally:
        os.close(handle)


def refuse_foreign_links(directory: Path) -> None:
    """Refuse a path through another user's symbolic link, which can be pointed elsewhere at any time."""
    trusted = (_ROOT, os.geteuid())
    absolute = directory.absolute()
    for path in (absolute, *absolute.parents):
        if path.is_symlink() and (owner := path.lstat().st_uid) not in trusted:
            raise StoreError(
                f"disk store: {directory} leads through {path}, a symbolic link of user {owner}, who could point it "
                f"elsewhere. Remedy: name the real directory, {absolute.resolve()}"
            )


def refuse_unfit(directory: Path, status: os.stat_result, *, tmpfs: bool) -> None:
    """Refuse a directory in which anybody may replace files, and one in memory unless `tmpfs` allows it."""
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise StoreError(
            f"disk store: everybody may write to {directory} and it has no sticky bit, so anybody could replace what "
            "is in it. Remedy: chmod o-w, or create a directory with mode 0700"
        )
    kind = file_system(status.st_dev)
    if kind in IN_MEMORY and not tmpfs:
        raise StoreError(
            f"disk store: {directory} is on {kind}, which keeps its files in memory, so nothing would be freed. "
            "Remedy: name a directory on a disk, or pass tmpfs=True if you mean it"
        )


def file_system(device: int) -> str:
    """Return the kind of the file system with this device number, or `"unknown"`."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return "unknown"
    for line in lines:
        fields, _, kind = line.partition(" - ")
        if fields.split()[2] == wanted:
            return kind.split()[0]
    return "unknown"


def free_bytes(directory: Path) -> int:
    """Return how many bytes this user may still write to a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


# --- The file -------------------------------------------------------------------------------------------------------


class ScratchFile:
    """A nameless private file in `directory` that holds up to `limit` bytes."""

    def __init__(self, directory: Path, limit: int, *, tmpfs: bool = False) -> None:
        self.directory = directory
        self.limit = limit
        self._lock = threading.Lock()
        self._ranges = RangeAllocator()
        self.peak = self.written = self.read_back = 0
        self._handle, self.direct = _open(directory, tmpfs=tmpfs)
        self._close = weakref.finalize(self, os.close, self._handle)

    @property
    def used(self) -> int:
        """Return the bytes in extents that are in use."""
        with self._lock:
            return self._ranges.used

    def allocate(self, sizes: list[int]) -> list[Extent] | None:
        """Return extents of these sizes, rounded up to pages, or None if the limit does not allow all of them."""
        extents = []
        with self._lock:
            for size in map(round_up, sizes):
                extent = self._ranges.allocate(size)
                if extent is None and self._ranges.grow(size, self.limit):
                    extent = self._ranges.allocate(size)
                if extent is None:
                    return None  # what was allocated is free again as the list dies
                extents.append(extent)
            self.peak = max(self.peak, self._ranges.used)
        return extents

    def write(self, extent: Extent, memory: memoryview) -> None:
        """Write memory to an extent; it must be page-aligned, and whole pages."""
        self._move(os.pwritev, extent, memory, "write")
        self.written += len(memory)

    def read(self, extent: Extent, memory: memoryview) -> None:
        """Read an extent into memory; it must be page-aligned, and whole pages."""
        self._move(os.preadv, extent, memory, "read")
        self.read_back += len(memory)

    def _move(self, call: Callable[..., int], extent: Extent, memory: memoryview, verb: str) -> None:
        """Move all bytes, or raise. A call may move fewer than asked; direct I/O then continues at a whole page."""
        done = 0
        while done < len(memory):
            try:
                count = call(self._handle, [memory[done:]], extent.start + done)
            except OSError as error:
                raise self._error(verb, extent, error.strerror, remedy(error)) from error
            if self.direct and done + count < len(memory):
                count -= count % PAGE
            if count <= 0:
                moved = f"only {format_bytes(done)} could be moved"
                raise self._error(verb, extent, moved, "the file was cut short or the disk is full: check the disk")
            done += count
        if not self.direct and hasattr(os, "posix_fadvise"):  # starts to write dirty pages, forgets clean ones
            os.posix_fadvise(self._handle, extent.start, done, os.POSIX_FADV_DONTNEED)

    def _error(self, verb: str, extent: Extent, reason: str | None, cure: str) -> StoreError:
        try:
            free = format_bytes(free_bytes(self.directory))
        except OSError:  # the directory may be gone, which does not matter to the file
            free = "an unknown amount"
        return StoreError(
            f"disk store in {self.directory}: could not {verb} {format_bytes(extent.end - extent.start)} at "
            f"{extent.start}: {reason} ({format_bytes(self.used)} in use of at most {format_bytes(self.limit)}, {free} "
            f"free on the disk). Remedy: {cure}"
        )


def _open(directory: Path, *, tmpfs: bool) -> tuple[int, bool]:
    """Open a new private file, and return its handle and whether its I/O is direct."""
    with opened(directory, tmpfs=tmpfs) as where:
        try:
            if _DIRECT and (handle := _open_direct(where, directory)) is not None:
                return handle, True
            return _open_nameless(where, directory, 0), False
        except OSError as error:
            raise StoreError(
                f"disk store: no file can be made in {directory}: {error.strerror}. Remedy: {remedy(error)}"
            ) from error


def _open_direct(where: int, directory: Path) -> int | None:
    """Open a file for direct I/O and move a page there and back. Return None if that fails: some refuse late."""
    memory = page_aligned(PAGE)
    page = buffer_of(memory)
    handle = None
    try:
        handle = _open_nameless(where, directory, _DIRECT)
        moved = os.pwritev(handle, [page], 0) == PAGE == os.preadv(handle, [page], 0)
        os.ftruncate(handle, 0)
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if error.errno != errno.EINVAL:
            raise
        return None
    if not moved:
        os.close(handle)
        return None
    return handle


def _open_nameless(where: int, directory: Path, flags: int) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(".", _FLAGS | flags | os.O_TMPFILE, 0o600, dir_fd=where)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    return _open_and_unlink(directory, flags)


def _open_and_unlink(directory: Path, flags: int) -> int:
    """Open a file in a new directory of mode 0700 and unlink it while it is empty, where O_TMPFILE is not supported."""
    private = Path(tempfile.mkdtemp(prefix=".lowtide-", dir=directory))
    path = private / "saved"
    try:
        return os.open(path, _FLAGS | flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        path.unlink(missing_ok=True)
        private.rmdir()


# --- Transfers ------------------------------------------------------------------------------------------------------


class Block:
    """A part of a tensor in a file."""

    __slots__ = ("checksum", "extent", "file", "size")

    def __init__(self, file: ScratchFile, extent: Extent, size: int) -> None:
        self.file, self.extent, self.size = file, extent, size
        self.checksum: int | None = None

    def save(self, memory: torch.Tensor, *, verify: bool) -> None:
        """Write whole pages, of which the first `size` bytes count."""
        view = buffer_of(memory)
        if verify:
            self.checksum = zlib.crc32(view[: self.size])
        self.file.write(self.extent, view)

    def load(self, memory: torch.Tensor) -> None:
        """Read whole pages, and compare them with the checksum if there is one."""
        view = buffer_of(memory)
        self.file.read(self.extent, view)
        if self.checksum is not None and zlib.crc32(view[: self.size]) != self.checksum:
            raise StoreError(
                f"disk store in {self.file.directory}: {format_bytes(self.size)} at {self.extent.start} are not what "
                "was written there: their checksum differs. No gradient was computed from them. Remedy: the disk or "
                "its connection corrupts data: name a directory on another one"
            )


class Workers:
    """The threads of a disk store. They end when it dies; at the end of the program, they finish what is queued."""

    def __init__(self, threads: int) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="lowtide-disk")
        self.staging = Staging()

    def run(self, tasks: Sequence[Task]) -> Transfer:
        return Transfer([self._executor.submit(task.run) for task in tasks])


class Transfer:
    """The tasks that together move one tensor."""

    def __init__(self, futures: list[concurrent.futures.Future[None]]) -> None:
        self._futures = futures

    def wait(self) -> None:
        """Wait until all are done. Raise the first error, and cancel what has not begun by then."""
        try:
            for future in self._futures:
                future.result()
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the tasks that have not begun; the others finish by themselves."""
        for future in self._futures:
            future.cancel()


class Staging:
    """One buffer per thread, which lives as long as the thread."""

    def __init__(self) -> None:
        self.copy_streams = CopyStreamCache()
        self._memory = HostMemory()
        self._thread = threading.local()
        self._buffers: weakref.WeakSet[_Buffer] = weakref.WeakSet()
        self.peak = 0

    @property
    def bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in list(self._buffers))

    @property
    def pageable_bytes(self) -> int:
        """Return the bytes that should have been pinned and could not be."""
        return self._memory.pageable_bytes

    def buffer(self, size: int, *, pinned: bool) -> torch.Tensor:
        """Return at least `size` bytes of this thread's buffer, in whole pages; valid until the thread asks again."""
        held: _Buffer | None = getattr(self._thread, "buffer", None)
        if held is None or held.memory.nbytes < size or held.pinned < pinned:
            self._thread.buffer = held = None
            length = 1 << (round_up(size) - 1).bit_length()
            held = _Buffer(self._memory(length) if pinned else page_aligned(length), pinned)
            self._buffers.add(held)
            self._thread.buffer = held
            self.peak = max(self.peak, self.bytes)
        return held.memory[: round_up(size)]


class _Buffer:
    def __init__(self, memory: torch.Tensor, pinned: bool) -> None:
        self.memory, self.pinned = memory, pinned


class Task:
    """Moves one block; `part` is the tensor's memory for it, which may be used as soon as `ready` has occurred."""

    def __init__(
        self, staging: Staging, block: Block, part: torch.Tensor, ready: torch.Event | None, *, verify: bool = False
    ) -> None:
        self._staging, self._block, self._verify = staging, block, verify
        self._part: torch.Tensor | None = part
        self._ready = ready

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.move()
        finally:
            self._part = None  # before the waiter is notified

    def move(self) -> None:
        raise NotImplementedError

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None) -> None:
        """Copy, and wait until `target` holds the bytes, also if a device makes the copy."""
        if stream is None:
            if self._ready is not None:
                self._ready.synchronize()
            target.copy_(source)
            return
        if self._ready is not None:
            stream.wait_event(self._ready)
        with stream:
            target.copy_(source, non_blocking=True)
        stream.record_event().synchronize()


class Save(Task):
    """Moves a block from a tensor to the file."""

    def move(self) -> None:
        part: torch.Tensor = self._part  # type: ignore[assignment]
        on_host = part.device.type == "cpu"
        memory = self._staging.buffer(self._block.size, pinned=not on_host)
        stream = None if on_host else self._staging.copy_streams.on(part.device).d2h
        self._copy(memory[: self._block.size], part, stream)
        self._block.save(memory, verify=self._verify)


class Load(Task):
    """Moves a block from the file to a tensor. On the host, `part` is whole pages and read into directly."""

    def move(self) -> None:
        part: torch.Tensor = self._part  # type: ignore[assignment]
        if part.device.type == "cpu":
            self._block.load(part)
            return
        memory = self._staging.buffer(self._block.size, pinned=True)
        self._block.load(memory)
        self._copy(part, memory[: self._block.size], self._staging.copy_streams.on(part.device).h2d)


def in_blocks(raw: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Split a flat tensor into views of `block` bytes each; the last may be shorter."""
    return list(torch.split(raw.view(torch.uint8), block))
