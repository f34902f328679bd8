"""Writes a trace in other tools' formats: Chrome's trace events, and snapshots for pytorch.org/memory_viz.

Perfetto and chrome://tracing show Chrome's trace events. One track has the phases of the step, one has the regions'
forward, recompute and backward, and one has the copies. Counters have the device's bytes by kind, what torch's
allocator counts, and what the stores hold.

A snapshot has the format of `torch.cuda.memory._snapshot`. Its sizes, order and times are those of the events. The two
places are two devices: 0 is the model's, 1 the host. Addresses are made up, first fit in one segment for each place,
because the real ones tell nothing once memory is freed. In place of torch's stack of calls there is one line: the
region and the phase that made the bytes. A storage has one category, the kind of its last owner: what was saved is
`saved` from the beginning.
"""

from __future__ import annotations

import itertools
import json
import pickle
from typing import TYPE_CHECKING, Any

from lowtide.recording import read_timeline
from lowtide.stores.host_memory import FreeRanges
from lowtide.tracing.result import KINDS, OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.recording import Event
    from lowtide.tracing.phases import Span
    from lowtide.tracing.result import Trace

# --- Chrome's trace events ------------------------------------------------------------------------------------------

_PROCESS = 1

_TRACKS = {"phases": 1, "regions": 2, "copies": 3}

_POINTS = 4000
"""About how many points a counter has."""


def chrome_trace(trace: Trace) -> str:
    """Return a trace as Chrome's trace events, in JSON."""
    events = sorted(
        itertools.chain(_phases(trace), _regions(trace), _copies(trace), _counters(trace)), key=lambda e: e["ts"]
    )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*_names(trace), *events]})


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", f"{trace.model} on {trace.device}", 0)
    for name, track in _TRACKS.items():
        yield _metadata("thread_name", name, track)


def _metadata(what: str, name: str, track: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _phases(trace: Trace) -> Iterator[dict[str, Any]]:
    for phase, neighbours in itertools.groupby(trace.spans, key=_outer_phase):
        group = list(neighbours)
        if phase != "between":
            yield _span(phase, phase, "phases", group[0].begin, group[-1].end)


def _outer_phase(span: Span) -> str:
    """Return the phase of the whole step that a span belongs to: recomputations are a part of backward."""
    return "backward" if span.phase == "recompute" else span.phase


def _regions(trace: Trace) -> Iterator[dict[str, Any]]:
    for span in trace.spans:
        if span.region:
            yield _span(f"{span.region} {span.phase}", span.phase, "regions", span.begin, span.end)


def _span(name: str, category: str, track: str, begin: float, end: float) -> dict[str, Any]:
    common = {"ph": "X", "name": name, "cat": category, "pid": _PROCESS, "tid": _TRACKS[track]}
    return common | {"ts": _microseconds(begin), "dur": _microseconds(end) - _microseconds(begin)}


def _copies(trace: Trace) -> Iterator[dict[str, Any]]:
    for move in trace.moves:
        yield {
            "ph": "i",
            "s": "t",
            "name": move.direction,
            "cat": "copy",
            "pid": _PROCESS,
            "tid": _TRACKS["copies"],
            "ts": _microseconds(move.seconds),
            "args": {"bytes": move.nbytes, "region": move.region, "phase": move.phase},
        }


def _counters(trace: Trace) -> Iterator[dict[str, Any]]:
    for sample in read_timeline(trace, _POINTS):
        yield _counter("device bytes", sample.seconds, {KINDS[kind]: sample.nbytes.get(kind, 0) for kind in KINDS})
    for level in trace.levels:
        if level.allocated is not None:
            yield _counter("allocator", level.seconds, {"bytes": level.allocated})
        if level.stored:
            yield _counter("stores", level.seconds, level.stored)


def _counter(name: str, seconds: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": _microseconds(seconds), "args": values}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# --- Snapshots for memory_viz ---------------------------------------------------------------------------------------

_PLACES = ("device", "host")

_PROTOCOL = 4
"""The highest protocol of pickles that the page reads."""

_BASE = 2**32
"""The first address: 0 would look like none."""


def memory_viz_snapshot(trace: Trace) -> bytes:
    """Return a trace as a pickled snapshot, to be written to a file and dropped on the page."""
    last = {event.storage: event.owner.kind for event in trace.events}
    histories = [_History(device, place, last) for device, place in enumerate(_PLACES)]
    for history in histories:
        for event in trace.events:
            if event.place == history.place:
                history.take(event)
        history.end(trace.spans[-1].end if trace.spans else 0.0)
    snapshot = {
        "segments": [segment for history in histories if (segment := history.segment())],
        "device_traces": [history.entries for history in histories],
        "allocator_settings": {},
    }
    return pickle.dumps(snapshot, protocol=_PROTOCOL)


class _Block:
    """A storage with an address, in the snapshot's words."""

    def __init__(self, address: int, size: int, event: Event, kind: str) -> None:
        self.address, self.size = address, size
        self.frames = [
            {
                "filename": event.owner.region or event.moment.region or OUTSIDE,
                "line": 0,
                "name": kind if event.moment.phase == "between" else f"{kind}, made in {event.moment.phase}",
            }
        ]
        self.category = kind


class _History:
    """The entries of one place, and the blocks that are left at the end."""

    def __init__(self, device: int, place: str, kinds: dict[int, str]) -> None:
        self.place = place
        self._kinds = kinds
        self.entries: list[dict[str, Any]] = []
        self._device = device
        self._free = FreeRanges((0, 2**62))
        self._blocks: dict[int, _Block] = {}
        self._top = 0

    def take(self, event: Event) -> None:
        """Write an event's entries. The page knows no resize: a storage of a new size is freed and allocated again."""
        if event.change == 0:
            return
        block = self._blocks.pop(event.storage, None)
        size = (block.size if block else 0) + event.change
        if block is not None:
            self._write("free_requested", block, event.seconds)
            self._write("free_completed", block, event.seconds)
            self._free.free(block.address - _BASE, block.address - _BASE + block.size)
        start = self._free.allocate(size) if size else None
        if start is not None:
            self._top = max(self._top, start + size)
            block = self._blocks[event.storage] = _Block(_BASE + start, size, event, self._kinds[event.storage])
            self._write("alloc", block, event.seconds)

    def end(self, seconds: float) -> None:
        """End the entries as torch does. The page colours by category only if one is called `unknown`."""
        if self.entries:
            common = {"addr": 0, "size": 0, "stream": 0, "frames": [], "time_us": _whole_microseconds(seconds)}
            self.entries.append({"action": "snapshot", "category": "unknown", **common})

    def segment(self) -> dict[str, Any] | None:
        """Return the one segment in which all blocks lie; None if there were none."""
        if not self._top:
            return None
        active = sum(block.size for block in self._blocks.values())
        return {
            "device": self._device,
            "address": _BASE,
            "total_size": self._top,
            "allocated_size": active,
            "active_size": active,
            "requested_size": active,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": self._layout(),
        }

    def _layout(self) -> list[dict[str, Any]]:
        """Return the blocks of the segment from its start to its end, including gaps."""
        blocks = []
        position = _BASE
        for block in sorted(self._blocks.values(), key=lambda block: block.address):
            if block.address > position:
                blocks.append(_piece(position, block.address - position, "inactive", []))
            blocks.append(_piece(block.address, block.size, "active_allocated", block.frames))
            position = block.address + block.size
        if position < _BASE + self._top:
            blocks.append(_piece(position, _BASE + self._top - position, "inactive", []))
        return blocks

    def _write(self, action: str, block: _Block, seconds: float) -> None:
        self.entries.append(
            {
                "action": action,
                "addr": block.address,
                "size": block.size,
                "stream": 0,
                "time_us": _whole_microseconds(seconds),
                "frames": block.frames,
                "category": block.category,
            }
        )


def _piece(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _whole_microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
