"""A disk that fails on purpose: `os.pwritev` and `os.preadv`, which only disk stores call, wrapped."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


class FaultyDisk:
    """Set what should go wrong; `calls` tells what was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._write, self._read = os.pwritev, os.preadv
        self._lock = threading.Lock()
        self._count = {"write": itertools.count(), "read": itertools.count()}
        self.calls: list[tuple[str, int]] = []
        self.write_error: tuple[int, int] | None = None
        """(which write from now on, counted from 0, errno); all later ones fail, too."""
        self.read_error: tuple[int, int] | None = None
        self.at_most: int | None = None
        """The most bytes that a call moves."""
        self.delay = 0.0
        patch.setattr(os, "pwritev", lambda handle, buffers, offset: self._do("write", handle, buffers, offset))
        patch.setattr(os, "preadv", lambda handle, buffers, offset: self._do("read", handle, buffers, offset))

    def _do(self, verb, handle, buffers, offset):
        with self._lock:  # what should go wrong with this call: another thread may heal the disk meanwhile
            number = next(self._count[verb])
            self.calls.append((verb, len(buffers[0])))
            error = self.write_error if verb == "write" else self.read_error
            delay, at_most = self.delay, self.at_most
        if delay:
            time.sleep(delay)
        if error is not None and number >= error[0]:
            raise OSError(error[1], os.strerror(error[1]))
        call = self._write if verb == "write" else self._read
        if at_most is None:
            return call(handle, buffers, offset)
        pages = -(-at_most // 4096) * 4096  # a real disk moves whole pages, and may tell of fewer bytes
        return min(call(handle, [buffers[0][:pages]], offset), at_most)

    def heal(self) -> None:
        self.write_error = self.read_error = self.at_most = None
        self.delay = 0.0

    def fail_writes(self, number: int, error: int) -> None:
        with self._lock:
            self._count["write"] = itertools.count()
            self.write_error = (number, error)

    def fail_reads(self, number: int, error: int) -> None:
        with self._lock:
            self._count["read"] = itertools.count()
            self.read_error = (number, error)
