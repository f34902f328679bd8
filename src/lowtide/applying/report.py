"""What a policy did, as data; printed with equal neighbours in one line (`layers.0-35 x36`)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import TYPE_CHECKING, Any, Protocol

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lowtide.measure import RegionLedger, TileLedger
    from lowtide.stores import DiskUsage


@dataclasses.dataclass(frozen=True)
class RegionReport:
    """The counts of one region, with the policy that it had."""

    name: str
    policy: str
    forwards: int
    recomputes: int
    packed_bytes: int
    kept_bytes: int
    restored_bytes: int
    declined_bytes: int

    @classmethod
    def of(cls, ledger: RegionLedger, policy: str) -> RegionReport:
        counts = {
            field.name: getattr(ledger, field.name) for field in dataclasses.fields(cls) if field.name != "policy"
        }
        return cls(policy=policy, **counts)


@dataclasses.dataclass(frozen=True)
class Report:
    """All regions of an applied policy, and what the store holds."""

    policy: str
    regions: list[RegionReport]
    tiles: list[TileLedger]
    """MLPs, mixtures of experts and the loss, if they run in tiles."""
    host_bytes: int
    peak_host_bytes: int
    seconds_waited: float
    """How long compute waited for copies."""
    pageable_bytes: int = 0
    """Bytes of host memory that could not be pinned: their copies do not overlap with compute."""
    disk: DiskUsage | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def figures(self) -> dict[str, float]:
        """Everything in a few numbers, for a training log."""
        return {
            "recomputes": sum(region.recomputes for region in self.regions),
            "packed_bytes": sum(region.packed_bytes for region in self.regions),
            "restored_bytes": sum(region.restored_bytes for region in self.regions),
            "tiles": sum(tiled.tiles for tiled in self.tiles),
            "host_bytes": self.host_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "seconds_waited": self.seconds_waited,
            "disk_bytes": self.disk.bytes if self.disk else 0,
            "peak_disk_bytes": self.disk.peak_bytes if self.disk else 0,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """A page. Needs the `html` extra."""
        from lowtide.applying.page import as_page

        return as_page(self)

    def __str__(self) -> str:
        lines = [f"policy {self.policy}: {len(self.regions)} regions"]
        for _, neighbours in itertools.groupby(self.regions, key=_likeness):
            group = list(neighbours)
            first = group[0]
            lines.append(
                f"  {grouped_name(group)} [{first.policy}] forwards {first.forwards}, recomputes {first.recomputes}, "
                f"packed {range_of(group, 'packed_bytes')}, restored {range_of(group, 'restored_bytes')}, "
                f"kept {range_of(group, 'kept_bytes')}"
            )
        for _, equals in itertools.groupby(self.tiles, key=_likeness_of_tiles):
            tiled = list(equals)
            lines.append(
                f"  {grouped_name(tiled)} [tile] calls {tiled[0].calls}, tiles {tiled[0].tiles}, "
                f"run again {tiled[0].recomputed_tiles}"
            )
        declined = sum(region.declined_bytes for region in self.regions)
        lines.append(
            f"  host memory {format_bytes(self.host_bytes)} now, {format_bytes(self.peak_host_bytes)} at the peak; "
            f"compute waited {self.seconds_waited * 1e3:.1f} ms for copies"
        )
        if self.disk is not None:
            lines.append(f"  {_disk_line(self.disk)}")
        if self.pageable_bytes:
            lines.append(
                f"  {format_bytes(self.pageable_bytes)} of host memory could not be pinned: copies of it do not overlap"
            )
        if declined:
            place = "host memory" if self.disk is None else f"the disk (limit {format_bytes(self.disk.limit)})"
            lines.append(f"  {format_bytes(declined)} found no room in {place} and stayed where they were")
        return "\n".join(lines)


def _disk_line(disk: DiskUsage) -> str:
    kind = "direct I/O" if disk.direct else "buffered I/O, for the file system allows no direct I/O"
    return (
        f"disk {disk.directory}: {format_bytes(disk.bytes)} now, {format_bytes(disk.peak_bytes)} at the peak, "
        f"{format_bytes(disk.written_bytes)} written, {format_bytes(disk.read_bytes)} read; {kind}"
        f"{', checksums compared' if disk.verify else ''}"
    )


_NUMBERED = re.compile(r"(?P<before>.*?)(?P<number>\d+)(?P<after>\D*)$")


def stack_of(name: str) -> tuple[str, ...]:
    """A name without its last number."""
    match = _NUMBERED.match(name)
    return (match["before"], match["after"]) if match else (name,)


def _likeness(region: RegionReport) -> tuple[Any, ...]:
    return stack_of(region.name), region.policy, region.forwards, region.recomputes


def _likeness_of_tiles(ledger: TileLedger) -> tuple[Any, ...]:
    return stack_of(ledger.name), ledger.calls, ledger.tiles, ledger.recomputed_tiles


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def grouped_name(group: Sequence[_Named]) -> str:
    """Neighbours of one stack in one word: `layers.0-35 x36`."""
    first, last = (_NUMBERED.match(group[place].name) for place in (0, -1))
    if len(group) == 1 or first is None or last is None:
        return group[0].name
    return f"{first['before']}{first['number']}-{last['number']}{first['after']} x{len(group)}"


def range_of(group: Sequence[object], figure: str) -> str:
    """The bytes of neighbours: one size, or the least and the most."""
    values = sorted(getattr(region, figure) for region in group)
    if values[0] == values[-1]:
        return format_bytes(values[0])
    return f"{format_bytes(values[0])} to {format_bytes(values[-1])}"
