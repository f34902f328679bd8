"""The trace as Chrome's trace events, which Perfetto and chrome://tracing show.

One track has the phases of the step, one the regions' forward, recompute and backward, one the copies. Counters have
the device's bytes by kind, what torch's allocator counts, and what the stores hold.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from lowtide.recording.reading import read_timeline
from lowtide.tracing.result import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.tracing.result import Trace
    from lowtide.tracing.whereabouts import Span

_PROCESS = 1
_TRACKS = {"phases": 1, "regions": 2, "copies": 3}
_POINTS = 4000


def as_chrome(trace: Trace) -> str:
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
    """Recomputations are a part of backward."""
    return "backward" if span.phase == "recompute" else span.phase


def _regions(trace: Trace) -> Iterator[dict[str, Any]]:
    for span in trace.spans:
        if span.region:
            yield _span(_title(span), span.phase, "regions", span.begin, span.end)


def _title(span: Span) -> str:
    return f"{span.region} {span.phase}"


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
