"""Keeps virtual time: streams, events and a link to the host, without a device.

Kernels and copies are put on a stream in the order of the program. A kernel starts when its stream is free, a copy when
its stream and its direction of the link are free; an event holds the time of its stream. As every queue is served in
order, this gives the times of a discrete-event simulation without an event queue. `Stream` and `Event` have the methods
of `torch.Stream` and `torch.Event`, so that the engine's own code drives the clock once `device` has put them in place.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

DEVICE = torch.device("meta")
"""The device of the simulated accelerator's tensors: torch computes their shapes and nothing else."""


@dataclasses.dataclass
class Clock:
    """The time of every stream and of the link, in seconds."""

    link_bytes_per_second: float = 25e9
    launch_seconds: float = 10e-6
    """How long the host takes to submit a kernel or a copy: Python, the dispatcher, autograd and the driver."""
    least_seconds: float = 3e-6
    """How long a kernel takes at the least, however little it does."""
    host: float = 0.0
    """The host's own time: how far the program has come."""
    busy: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    """Seconds of work by kind of kernel, and by direction of the link."""

    def __post_init__(self) -> None:
        self._link_free = {"to_host": 0.0, "to_device": 0.0}
        self.compute = Stream(self)
        self.current = self.compute

    def kernel(self, seconds: float, kind: str) -> None:
        """Run a kernel on the current stream."""
        seconds = max(seconds, self.least_seconds)
        self.host += self.launch_seconds
        self.current.time = max(self.current.time, self.host) + seconds
        self.busy[kind] += seconds

    def copy(self, nbytes: int, direction: str, *, blocking: bool) -> None:
        """Copy bytes over the link, on the current stream; the host waits for a blocking copy."""
        seconds = nbytes / self.link_bytes_per_second
        self.host += self.launch_seconds
        start = max(self.current.time, self._link_free[direction], self.host)
        self.current.time = self._link_free[direction] = start + seconds
        self.busy[direction] += seconds
        if blocking:
            self.host = self.current.time

    def synchronize(self) -> float:
        """Let the host wait until all work is done, and return that time."""
        self.host = max(self.host, self.compute.time, *self._link_free.values())
        return self.host


class Stream:
    """A queue of work; as a context manager it is the current stream inside, like `torch.Stream`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.device = DEVICE
        self.stream_id = 0
        self.time = 0.0
        self._replaced: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.time = max(self.time, other.time)

    def wait_event(self, event: Event) -> None:
        self.time = max(self.time, event.time)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.clock)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.clock.host = max(self.clock.host, self.time)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        """Tell that no graph is captured: torch's optimizers ask since 2.15."""
        return False

    def __enter__(self) -> Self:
        self._replaced.append(self.clock.current)
        self.clock.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clock.current = self._replaced.pop()


class Event:
    """A moment on a stream."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.time = (stream or self.clock.current).time

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.clock.current).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.clock.host = max(self.clock.host, self.time)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until `end`, as torch's events do."""
        return (end.time - self.time) * 1e3
