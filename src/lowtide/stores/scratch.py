"""A private file without a name, cut into extents.

The file has no name from the start (O_TMPFILE), or loses it at once: nothing outlives the process, however it ends. It
is opened for direct I/O where the file system allows it. Its space is used again and again, and given back when the
store dies.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import StoreError
from lowtide.stores.directory import free_bytes, opened, remedy
from lowtide.stores.memory import PAGE, page_aligned, round_up
from lowtide.stores.ranges import Ground
from lowtide.stores.views import buffer_of
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.stores.ranges import Cut

_DIRECT: int = getattr(os, "O_DIRECT", 0)
_FLAGS = os.O_RDWR | os.O_CLOEXEC
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class ScratchFile:
    """A file in `directory` that holds up to `limit` bytes."""

    def __init__(self, directory: Path, limit: int, *, tmpfs: bool = False) -> None:
        self.directory = directory
        self.limit = limit
        self._lock = threading.Lock()
        self._ground = Ground()
        self.peak = self.written = self.read_back = 0
        self._handle, self.direct = _open(directory, tmpfs=tmpfs)
        self._close = weakref.finalize(self, os.close, self._handle)

    @property
    def used(self) -> int:
        """Bytes in extents that are held."""
        with self._lock:
            return self._ground.used

    def take(self, sizes: list[int]) -> list[Cut] | None:
        """Extents of these sizes, in whole pages; nothing if the limit does not allow all of them."""
        extents = []
        with self._lock:
            for size in map(round_up, sizes):
                extent = self._ground.cut(size)
                if extent is None and self._ground.grow(size, self.limit):
                    extent = self._ground.cut(size)
                if extent is None:
                    return None  # what was cut is free again as the list dies
                extents.append(extent)
            self.peak = max(self.peak, self._ground.used)
        return extents

    def write(self, extent: Cut, memory: memoryview) -> None:
        """Fill an extent with whole pages that begin at a page."""
        self._move(os.pwritev, extent, memory, "write")
        self.written += len(memory)

    def read(self, extent: Cut, memory: memoryview) -> None:
        """Fill whole pages that begin at a page from an extent."""
        self._move(os.preadv, extent, memory, "read")
        self.read_back += len(memory)

    def _move(self, call: Callable[..., int], extent: Cut, memory: memoryview, verb: str) -> None:
        """All of it, or an error. A call may move less than it was asked for; direct I/O goes on at a whole page."""
        done = 0
        while done < len(memory):
            try:
                count = call(self._handle, [memory[done:]], extent.start + done)
            except OSError as error:
                raise self._fault(verb, extent, error.strerror, remedy(error)) from error
            if self.direct and done + count < len(memory):
                count -= count % PAGE
            if count <= 0:
                got = f"only {format_bytes(done)} could be moved"
                raise self._fault(verb, extent, got, "the file was cut short or the disk is full: check the disk")
            done += count
        if not self.direct and hasattr(os, "posix_fadvise"):  # starts to write dirty pages, forgets clean ones
            os.posix_fadvise(self._handle, extent.start, done, os.POSIX_FADV_DONTNEED)

    def _fault(self, verb: str, extent: Cut, what: str | None, cure: str) -> StoreError:
        try:
            free = format_bytes(free_bytes(self.directory))
        except OSError:  # the directory may be gone, which does not matter to the file
            free = "an unknown amount"
        return StoreError(
            f"disk store in {self.directory}: could not {verb} {format_bytes(extent.end - extent.start)} at "
            f"{extent.start}: {what} ({format_bytes(self.used)} in use of at most {format_bytes(self.limit)}, {free} "
            f"free on the disk). Remedy: {cure}"
        )


def _open(directory: Path, *, tmpfs: bool) -> tuple[int, bool]:
    """A handle of a new private file, and whether its I/O is direct."""
    with opened(directory, tmpfs=tmpfs) as where:
        try:
            if _DIRECT and (handle := _tried(where, directory)) is not None:
                return handle, True
            return _nameless(where, directory, 0), False
        except OSError as error:
            raise StoreError(
                f"disk store: no file can be made in {directory}: {error.strerror}. Remedy: {remedy(error)}"
            ) from error


def _tried(where: int, directory: Path) -> int | None:
    """A handle for direct I/O that has moved a page there and back, or nothing: some file systems refuse late."""
    memory = page_aligned(PAGE)
    page = buffer_of(memory)
    handle = None
    try:
        handle = _nameless(where, directory, _DIRECT)
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


def _nameless(where: int, directory: Path, flags: int) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(".", _FLAGS | flags | os.O_TMPFILE, 0o600, dir_fd=where)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    return _unlinked(directory, flags)


def _unlinked(directory: Path, flags: int) -> int:
    """For file systems without nameless files: made in a directory of mode 0700, and unlinked while it is empty."""
    private = Path(tempfile.mkdtemp(prefix=".lowtide-", dir=directory))
    path = private / "saved"
    try:
        return os.open(path, _FLAGS | flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        path.unlink(missing_ok=True)
        private.rmdir()
