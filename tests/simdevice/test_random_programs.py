"""Random programs on several streams: the detector agrees with a brute-force search for unordered conflicts."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide import simdevice

STREAMS, BUFFERS = 3, 2

streams = st.integers(0, STREAMS - 1)
buffers = st.integers(0, BUFFERS - 1)
operations = st.one_of(
    st.tuples(st.just("read"), streams, buffers),
    st.tuples(st.just("write"), streams, buffers),
    st.tuples(st.just("copy out"), streams, buffers),
    st.tuples(st.just("copy in"), streams, buffers),
    st.tuples(st.just("wait"), streams, streams),
    st.tuples(st.just("record"), streams, st.just(0)),
    st.tuples(st.just("wait event"), streams, st.just(0)),
    st.tuples(st.just("host wait"), streams, st.just(0)),
)

WRITES = {"write", "copy in"}
ACCESSES = {"read", "write", "copy in", "copy out"}


@dataclasses.dataclass
class Oracle:
    """Keeps, for every access, the set of all accesses that it is ordered after: no clocks, no pruning."""

    known: list[set[int]] = dataclasses.field(default_factory=lambda: [set() for _ in range(STREAMS)])
    host: set[int] = dataclasses.field(default_factory=set)
    event: set[int] = dataclasses.field(default_factory=set)
    accesses: list[tuple[int, int, bool]] = dataclasses.field(default_factory=list)
    racy: bool = False

    def step(self, name: str, stream: int, other: int) -> None:
        known = self.known[stream]
        if name == "wait":
            known |= self.known[other] | self.host
        elif name == "record":
            self.event = known | self.host
        elif name == "wait event":
            known |= self.event
        elif name == "host wait":
            self.host |= known
        else:
            self.access(stream, other, write=name in WRITES)

    def access(self, stream: int, buffer: int, *, write: bool) -> None:
        known = self.known[stream]
        known |= self.host
        for number, (_, other_buffer, other_write) in enumerate(self.accesses):
            if other_buffer == buffer and (write or other_write) and number not in known:
                self.racy = True
        known.add(len(self.accesses))
        self.accesses.append((stream, buffer, write))


class Program:
    """The same steps on the device."""

    def __init__(self) -> None:
        self.streams = [torch.Stream(device="sim") for _ in range(STREAMS)]
        self.buffers = [torch.zeros(16, device="sim") for _ in range(BUFFERS)]
        self.hosts = []
        self.event = torch.Event(device="sim")
        torch.accelerator.synchronize()

    def step(self, name: str, stream: int, other: int) -> None:
        on = self.streams[stream]
        if name == "wait":
            on.wait_stream(self.streams[other])
        elif name == "record":
            self.event.record(on)
        elif name == "wait event":
            on.wait_event(self.event)
        elif name == "host wait":
            on.synchronize()
        else:
            with on:
                self.access(name, self.buffers[other])

    def access(self, name: str, buffer: torch.Tensor) -> None:
        if name == "write":
            buffer.fill_(1)
        elif name == "read":
            self.hosts.append(buffer + 1)
        else:
            host = torch.zeros(16).pin_memory()
            self.hosts.append(host)
            if name == "copy in":
                buffer.copy_(host, non_blocking=True)
            else:
                host.copy_(buffer, non_blocking=True)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(operations, min_size=2, max_size=14))
def test_the_detector_agrees_with_brute_force(sim, steps):
    simdevice.reset()
    program, oracle = Program(), Oracle()
    for step in steps:
        program.step(*step)
        oracle.step(*step)
        assert bool(simdevice.violations()) == oracle.racy, step
        if oracle.racy:
            break
    torch.accelerator.synchronize()
    del program
    simdevice.reset()
