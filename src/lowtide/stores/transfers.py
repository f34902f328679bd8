"""Blocks on their way between a tensor and a file, moved by a few threads.

A tensor moves in blocks, each a task of its own. A thread has one staging buffer, page-aligned and used again and
again (fresh memory is several times slower to touch), pinned if the tensors are on an accelerator. So the host memory
in use is threads x block size, however much is queued, and while one thread copies, another one is in a system call.

A task is done with the tensor's memory before it says that it is done: whoever waited for it may count on that.
"""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
import zlib
from typing import TYPE_CHECKING

import torch

from lowtide.errors import StoreError
from lowtide.stores.lanes import LanesOfDevices
from lowtide.stores.memory import HostMemory, page_aligned, round_up
from lowtide.stores.views import buffer_of
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lowtide.stores.ranges import Cut
    from lowtide.stores.scratch import ScratchFile


class Transfer:
    """Tasks that belong together."""

    def __init__(self, futures: list[concurrent.futures.Future[None]]) -> None:
        self._futures = futures

    def wait(self) -> None:
        """Until all are done; the first error is raised, and what has not begun then never will."""
        try:
            for future in self._futures:
                future.result()
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """What has not begun is not done; what has begun comes to its end by itself."""
        for future in self._futures:
            future.cancel()


class Workers:
    """The threads of a disk store. They end when it dies, and at the end of the program after what is queued."""

    def __init__(self, threads: int) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="lowtide-disk")
        self.staging = Staging()

    def run(self, tasks: Sequence[Task]) -> Transfer:
        return Transfer([self._executor.submit(task.run) for task in tasks])


class Staging:
    """One buffer per thread; it lives as long as the thread."""

    def __init__(self) -> None:
        self.lanes = LanesOfDevices()
        self._memory = HostMemory()
        self._of_thread = threading.local()
        self._buffers: weakref.WeakSet[_Buffer] = weakref.WeakSet()
        self.peak = 0

    @property
    def bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in list(self._buffers))

    @property
    def pageable_bytes(self) -> int:
        """Of memory that should have been pinned."""
        return self._memory.pageable_bytes

    def buffer(self, size: int, *, pinned: bool) -> torch.Tensor:
        """This thread's buffer, at least so large and in whole pages; valid until the thread asks again."""
        held: _Buffer | None = getattr(self._of_thread, "held", None)
        if held is None or held.memory.nbytes < size or held.pinned < pinned:
            self._of_thread.held = held = None
            length = 1 << (round_up(size) - 1).bit_length()
            held = _Buffer(self._memory(length) if pinned else page_aligned(length), pinned)
            self._buffers.add(held)
            self._of_thread.held = held
            self.peak = max(self.peak, self.bytes)
        return held.memory[: round_up(size)]


class _Buffer:
    def __init__(self, memory: torch.Tensor, pinned: bool) -> None:
        self.memory, self.pinned = memory, pinned


class Block:
    """A part of a tensor in a file."""

    __slots__ = ("checksum", "extent", "file", "size")

    def __init__(self, file: ScratchFile, extent: Cut, size: int) -> None:
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
                "was written there: their checksum differs. No gradient was made of them. Remedy: the disk or its "
                "connection corrupts data: give a directory on another one"
            )


class Task:
    """One block and the tensor's bytes for it."""

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
            self._part = None  # before the waiter is told

    def move(self) -> None:
        raise NotImplementedError

    def _copy(self, target: torch.Tensor, source: torch.Tensor, lane: torch.Stream | None) -> None:
        """`target` holds the bytes when this returns, also if a device makes the copy."""
        if lane is None:
            if self._ready is not None:
                self._ready.synchronize()
            target.copy_(source)
            return
        if self._ready is not None:
            lane.wait_event(self._ready)
        with lane:
            target.copy_(source, non_blocking=True)
        lane.record_event().synchronize()


class Save(Task):
    """From a tensor, when `ready` has come, to the file."""

    def move(self) -> None:
        part: torch.Tensor = self._part  # type: ignore[assignment]
        on_host = part.device.type == "cpu"
        memory = self._staging.buffer(self._block.size, pinned=not on_host)
        lane = None if on_host else self._staging.lanes.of(part.device).to_host
        self._copy(memory[: self._block.size], part, lane)
        self._block.save(memory, verify=self._verify)


class Load(Task):
    """From the file to a tensor, when `ready` has come. On the host, `part` is whole pages and read into directly."""

    def move(self) -> None:
        part: torch.Tensor = self._part  # type: ignore[assignment]
        if part.device.type == "cpu":
            self._block.load(part)
            return
        memory = self._staging.buffer(self._block.size, pinned=True)
        self._block.load(memory)
        self._copy(part, memory[: self._block.size], self._staging.lanes.of(part.device).to_device)


def in_blocks(raw: torch.Tensor, block: int) -> list[torch.Tensor]:
    """A flat tensor's bytes, block by block."""
    return list(torch.split(raw.view(torch.uint8), block))
