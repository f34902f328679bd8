"""A trace: what training steps held in memory and when, as data that is read out of events, spans and moves."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide.modules import grouped_name, range_of, stack_of
from lowtide.recording import read_peak, read_timeline
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.recording import Event, Peak, Sample, Tally
    from lowtide.tracing.ledger import Move
    from lowtide.tracing.phases import Span

KINDS = {
    "weights": "weights",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "saved": "saved activations",
    "recomputed": "recomputed activations",
    "restored": "brought back from a store",
    "working": "in work",
    "batch": "the batch",
    "other": "other",
}
"""Kinds of bytes on the device, in words."""

OUTSIDE = "outside the regions"


class Level(NamedTuple):
    """What torch's allocator and the stores count, read whenever the step moves on."""

    seconds: float
    phase: str
    region: str
    allocated: int | None
    """Device bytes by torch's allocator, including kernels' workspaces. None on the CPU, where it keeps no count."""
    stored: dict[str, int]
    """Bytes in the stores of an applied policy, by tier: `host` and `disk`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionTrace:
    """One region over the whole trace."""

    name: str
    forwards: int
    recomputes: int
    tile_reruns: int
    """How many tiles inside it were run again in backward, by an applied policy."""
    saved_bytes: int
    """Bytes that it made in forward and that were alive when backward began."""
    recomputed_bytes: int
    """The most bytes at once that its recomputations made."""
    to_host_bytes: int
    to_device_bytes: int
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float


@dataclasses.dataclass(kw_only=True)
class Trace:
    """What was recorded. It grows while the steps run, and can be read at any time, even after an error."""

    __module__ = "lowtide"

    model: str
    device: str
    regions: list[str]
    events: list[Event]
    """Every storage when it comes, changes its owner, and goes. Bytes belong to the region that made them."""
    start: int = 0
    """The index of the steps' first event; earlier events tell what was there already."""
    spans: list[Span]
    """When each region's forward, recompute and backward began and ended, in order."""
    moves: list[Move] = dataclasses.field(default_factory=list)
    levels: list[Level] = dataclasses.field(default_factory=list)
    saved: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes that forward saved, by region, at the beginning of the backward that had the most."""
    counted: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """The recomputes and the tiles that ran again by an applied policy's own count, by region. Looked at from outside,
    both are code that runs again in backward."""
    called_again: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """How often each region itself was called in backward, which a policy does not do, but a checkpoint around it."""

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes on the device at once."""
        return self.peak.nbytes

    @property
    def peak(self) -> Peak:
        """Return the peak with its moment and its owners."""
        return read_peak(self)

    @property
    def peak_host_bytes(self) -> int:
        """Return the most bytes of host memory that the steps made, where the model's device is not the host."""
        return read_peak(self, "host").nbytes

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    @property
    def samples(self) -> list[Sample]:
        """Return device memory over time, by kind: some hundred points, each the highest of its stretch."""
        return read_timeline(self)

    @property
    def samples_by_region(self) -> list[Sample]:
        """Return activations over time, at the same points, by the region that made them."""
        return read_timeline(self, read=_activations)

    def moved_bytes(self, direction: str) -> int:
        """Return the bytes that went `to host`, `to device`, `to disk` or `from disk`."""
        return sum(move.nbytes for move in self.moves if move.direction == direction)

    def by_region(self) -> list[RegionTrace]:
        """Return the figures of every region in the model's order, including those that did not run."""
        seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
        runs: collections.Counter[tuple[str, str]] = collections.Counter()
        for span in self.spans:
            seconds[span.phase, span.region] += span.end - span.begin
            runs[span.phase, span.region] += 1
        moved: collections.Counter[tuple[str, str]] = collections.Counter()
        for move in self.moves:
            moved[move.direction, move.region] += move.nbytes
        recomputed = _most_recomputed(self.events)
        return [
            RegionTrace(
                name=name,
                forwards=runs["forward", name],
                recomputes=self._recomputes(name, runs["recompute", name]),
                tile_reruns=self.counted.get(name, (0, 0))[1],
                saved_bytes=self.saved.get(name, 0),
                recomputed_bytes=recomputed[name],
                to_host_bytes=moved["to host", name],
                to_device_bytes=moved["to device", name],
                forward_seconds=seconds["forward", name],
                recompute_seconds=seconds["recompute", name],
                backward_seconds=seconds["backward", name],
            )
            for name in self.regions
        ]

    def _recomputes(self, name: str, seen: int) -> int:
        """Return how often a region was recomputed: by its policy's count, by a checkpoint around it, or as `seen`."""
        if name not in self.counted:
            return seen
        return self.counted[name][0] or self.called_again[name]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the single events, which `to_memory_viz` writes."""
        peak = self.peak
        return {
            "model": self.model,
            "device": self.device,
            "peak_bytes": peak.nbytes,
            "peak": {**peak.moment._asdict(), "owners": [[*owner, size] for owner, size in peak.owners.items()]},
            "peak_host_bytes": self.peak_host_bytes,
            "saved_bytes": self.saved_bytes,
            "saved": self.saved,
            "regions": [dataclasses.asdict(region) for region in self.by_region()],
            "samples": [
                {"seconds": sample.seconds, **sample.moment._asdict(), "bytes": sample.nbytes}
                for sample in self.samples
            ],
            "spans": [span._asdict() for span in self.spans],
            "moves": [move._asdict() for move in self.moves],
            "levels": [level._asdict() for level in self.levels],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return a page with the memory over time, by kind and by region. Needs the `html` extra."""
        from lowtide.tracing.page import trace_page

        return trace_page(self)

    def to_chrome(self) -> str:
        """Return JSON for Perfetto (ui.perfetto.dev) and chrome://tracing: spans of regions, and counters of bytes."""
        from lowtide.tracing.formats import chrome_trace

        return chrome_trace(self)

    def to_memory_viz(self) -> bytes:
        """Return a pickled snapshot for pytorch.org/memory_viz: every storage with its kind and region."""
        from lowtide.tracing.formats import memory_viz_snapshot

        return memory_viz_snapshot(self)

    def __str__(self) -> str:
        peak = self.peak
        where = f"{peak.moment.phase}, {peak.moment.region or OUTSIDE}"
        lines = [
            f"trace of {self.model} on {self.device}: peak {format_bytes(peak.nbytes)} in {where}",
            f"  at the peak: {_format_owners(peak)}",
            f"  saved for backward: {format_bytes(self.saved_bytes)}",
        ]
        for _, neighbours in itertools.groupby(self.by_region(), key=_group_key):
            group = list(neighbours)
            tiles = f"tiles run again {group[0].tile_reruns}, " if group[0].tile_reruns else ""
            lines.append(
                f"  {grouped_name(group)} forwards {group[0].forwards}, recomputes {group[0].recomputes}, {tiles}saved "
                f"{range_of(group, 'saved_bytes')}, recomputed {range_of(group, 'recomputed_bytes')}"
            )
        moved = {direction: self.moved_bytes(direction) for direction in dict.fromkeys(m.direction for m in self.moves)}
        if moved:
            lines.append(f"  moved: {', '.join(f'{format_bytes(size)} {where}' for where, size in moved.items())}")
        return "\n".join(lines)


def _activations(tally: Tally) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for owner, size in tally.by_owner.items():
        if owner.kind in ("saved", "recomputed", "restored", "working"):
            found[owner.region] += size
    return {region: size for region, size in found.items() if size}


def _most_recomputed(events: list[Event]) -> collections.Counter[str]:
    """Return the most bytes at once that each region's recomputations made."""
    now: collections.Counter[str] = collections.Counter()
    most: collections.Counter[str] = collections.Counter()
    owned: dict[int, tuple[str, int]] = {}
    for event in events:
        region, size = owned.pop(event.storage, ("", 0))
        now[region] -= size
        if event.owner.kind == "recomputed" and event.place == "device":
            size += event.change
            owned[event.storage] = (event.owner.region, size)
            now[event.owner.region] += size
            most[event.owner.region] = max(most[event.owner.region], now[event.owner.region])
    return most


def _group_key(region: RegionTrace) -> tuple[Any, ...]:
    return stack_of(region.name), region.forwards, region.recomputes, region.tile_reruns


def _format_owners(peak: Peak) -> str:
    kinds: collections.Counter[str] = collections.Counter()
    for owner, size in peak.owners.items():
        kinds[owner.kind] += size
    return ", ".join(f"{KINDS[kind]} {format_bytes(size)}" for kind, size in kinds.most_common() if size)
