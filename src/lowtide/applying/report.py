"""The report of an applied policy: what it did, as data, as text and as a page.

The text has equal neighbours in one line (`layers.0-35 x36`); the page shows bytes by region, the counts, the tiles and
the store.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any

from lowtide.charts import Series, columns
from lowtide.html import KINDS as COLOURS
from lowtide.html import TEMPLATES, render, unit_for
from lowtide.modules import ancestors, grouped_name, range_of, stack_of
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.counters import RegionLedger, TileLedger
    from lowtide.stores import DiskUsage


_LOGGED = ("saved_bytes", "recomputes", "tiles", "peak_host_bytes", "seconds_waited", "peak_disk_bytes")
"""The figures that a trainer's log gets."""


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
    inner_bytes: int = 0
    """Bytes that its first recompute saved and its forward had let go: plain training keeps them until backward."""
    kept_outputs: int = 0
    """Outputs of operators that were kept, by `recompute(keep=...)`."""
    recalled_outputs: int = 0
    """How often a recompute took a kept output instead of computing it."""
    is_small: bool = False
    """Whether all that it saved are small tensors and weights: there is nothing to offload."""

    @property
    def saved_per_step(self) -> int:
        """Bytes that the device does not hold between a forward and its backward, against plain training.

        What a module that runs in tiles would have saved as a whole is not known, and not among them.
        """
        return self.inner_bytes + self.packed_bytes // max(1, self.forwards)

    @property
    def keeps_outputs(self) -> bool:
        """Whether its policy keeps outputs of operators."""
        return "keep=" in self.policy

    @classmethod
    def of(cls, ledger: RegionLedger, policy: str) -> RegionReport:
        """Copy the counts of `ledger` as they are now."""
        counts = {
            field.name: getattr(ledger, field.name) for field in dataclasses.fields(cls) if field.name != "policy"
        }
        return cls(policy=policy, **counts)


@dataclasses.dataclass(frozen=True)
class Report:
    """What an applied policy did so far: region by region, in tiles, and in the store."""

    policy: str
    regions: list[RegionReport]
    tiles: list[TileLedger]
    """Blocks, MLPs, mixtures of experts, norms and the loss, if they run in tiles."""
    host_bytes: int
    peak_host_bytes: int
    seconds_waited: float
    """How long compute waited for copies."""
    pageable_bytes: int = 0
    """Bytes of host memory that could not be pinned: their copies do not overlap with compute."""
    disk: DiskUsage | None = None

    @property
    def declined_bytes(self) -> int:
        """Bytes that the store had no room for."""
        return sum(region.declined_bytes for region in self.regions)

    @property
    def saved_per_step(self) -> int:
        """Bytes that the regions do not hold on the device, against plain training; tiles save more than is counted."""
        return sum(region.saved_per_step for region in self.regions)

    def summary(self) -> str:
        """Return what happened in three lines: the policy, what it saves, and what it costs."""
        ran = [region for region in self.regions if region.forwards]
        tiled = [ledger for ledger in self.tiles if ledger.tiles > ledger.calls]
        lines = [f"policy {self.policy}: {len(self.regions)} regions, of which {len(ran)} ran"]
        if not any(region.recomputes or region.packed_bytes for region in ran) and not tiled:
            return f"{lines[0]}\nnothing was recomputed, moved or run in tiles yet"
        moved = sum(region.packed_bytes // max(1, region.forwards) for region in ran)
        least = "at least " if tiled else ""
        saves = f"saves {least}{format_bytes(self.saved_per_step)} of device memory per step against plain training"
        if not self.saved_per_step:
            saves = "what its tiles save of device memory is not counted"
        costs = f"{sum(region.recomputes for region in ran)} recomputes so far"
        if tiled:
            costs += f", {sum(ledger.tiles for ledger in tiled)} tiles in {sum(ledger.calls for ledger in tiled)} calls"
        if moved:
            saves += f", {format_bytes(moved)} of it by moving"
            costs += f", {format_bytes(self.peak_host_bytes)} of host memory at the peak"
            costs += f", {self.seconds_waited * 1e3:.1f} ms of waiting for copies"
        return "\n".join([*lines, saves, costs])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def figures(self) -> dict[str, float]:
        """Return everything in numbers."""
        return {
            "saved_bytes": self.saved_per_step,
            "recomputes": sum(region.recomputes for region in self.regions),
            "kept_outputs": sum(region.kept_outputs for region in self.regions),
            "recalled_outputs": sum(region.recalled_outputs for region in self.regions),
            "packed_bytes": sum(region.packed_bytes for region in self.regions),
            "restored_bytes": sum(region.restored_bytes for region in self.regions),
            "tiles": sum(tiled.tiles for tiled in self.tiles),
            "host_bytes": self.host_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "seconds_waited": self.seconds_waited,
            "disk_bytes": self.disk.bytes if self.disk else 0,
            "peak_disk_bytes": self.disk.peak_bytes if self.disk else 0,
        }

    def logged_figures(self) -> dict[str, float]:
        """Return the few numbers that belong into a training log, without those that are zero."""
        figures = self.figures()
        return {name: figures[name] for name in _LOGGED if figures[name]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return a page: one file that needs no network. Needs the `html` extra."""
        return render(
            _TEMPLATE,
            report=self,
            figures=self.figures(),
            declined=self.declined_bytes,
            keeps_outputs=any(region.keeps_outputs for region in self.regions),
            bars=_bars(self),
        )

    def __str__(self) -> str:
        shown = _lines_to_show(self.tiles)
        return "\n".join(
            [
                f"policy {self.policy}: {len(self.regions)} regions",
                *(_region_line(list(group)) for _, group in itertools.groupby(self.regions, key=_region_group)),
                *(_tile_line(list(group)) for _, group in itertools.groupby(shown, key=_tile_group)),
                *_still_lines(self),
                *_store_lines(self),
            ]
        )


def _region_group(region: RegionReport) -> tuple[Any, ...]:
    counts = (region.forwards, region.recomputes, region.kept_outputs, region.recalled_outputs)
    return stack_of(region.name), region.policy, *counts


def _region_line(group: list[RegionReport]) -> str:
    first = group[0]
    outputs = f"kept outputs {first.kept_outputs}, recalled {first.recalled_outputs}, " if first.keeps_outputs else ""
    return (
        f"  {grouped_name(group)} [{first.policy}] forwards {first.forwards}, recomputes {first.recomputes}, {outputs}"
        f"packed {range_of(group, 'packed_bytes')}, restored {range_of(group, 'restored_bytes')}, "
        f"kept {range_of(group, 'kept_bytes')}"
    )


def _lines_to_show(tiles: list[TileLedger]) -> list[TileLedger]:
    """Leave out what never ran by itself, because it is a part of a block that runs in tiles as a whole."""
    run = {ledger.name for ledger in tiles if ledger.calls}
    return [ledger for ledger in tiles if ledger.calls or not run.intersection(ancestors(ledger.name))]


def _tile_group(ledger: TileLedger) -> tuple[Any, ...]:
    counts = (ledger.calls, ledger.tiles, ledger.recomputed_tiles, ledger.left_alone_calls)
    return stack_of(ledger.name), *counts, ledger.left_alone


def _tile_line(group: list[TileLedger]) -> str:
    first = group[0]
    if first.left_alone and not first.calls:
        return f"  {grouped_name(group)} [tile] left alone: {first.left_alone}"
    some = f"{first.left_alone_calls} of {first.calls} calls " if first.left_alone_calls < first.calls else ""
    alone = f" ({some}left alone: {first.left_alone})" if first.left_alone else ""
    counts = f"calls {first.calls}, tiles {first.tiles}, run again {first.recomputed_tiles}"
    return f"  {grouped_name(group)} [tile] {counts}{alone}"


def _still_lines(report: Report) -> Iterator[str]:
    """Name the regions that have nothing to offload: their inputs are small, or weights."""
    still = (region for region in report.regions if region.is_small and "offload" in region.policy)
    for _, group in itertools.groupby(still, key=_region_group):
        yield f"  {grouped_name(list(group))}: nothing to offload, all inputs are smaller than 4 KiB or weights"


def _store_lines(report: Report) -> Iterator[str]:
    yield (
        f"  host memory {format_bytes(report.host_bytes)} now, {format_bytes(report.peak_host_bytes)} at the peak; "
        f"compute waited {report.seconds_waited * 1e3:.1f} ms for copies"
    )
    if report.disk is not None:
        yield f"  {_disk_line(report.disk)}"
    if report.pageable_bytes:
        pageable = format_bytes(report.pageable_bytes)
        yield f"  {pageable} of host memory could not be pinned: copies of it do not overlap"
    if report.declined_bytes:
        place = "host memory" if report.disk is None else f"the disk (limit {format_bytes(report.disk.limit)})"
        yield f"  {format_bytes(report.declined_bytes)} found no room in {place} and stayed where they were"


def _disk_line(disk: DiskUsage) -> str:
    kind = "direct I/O" if disk.direct else "buffered I/O, because the file system does not allow direct I/O"
    return (
        f"disk {disk.directory}: {format_bytes(disk.bytes)} now, {format_bytes(disk.peak_bytes)} at the peak, "
        f"{format_bytes(disk.written_bytes)} written, {format_bytes(disk.read_bytes)} read; {kind}"
        f"{', checksums compared' if disk.verify else ''}"
    )


_TEMPLATE = TEMPLATES / "applied.html"

_SERIES = {
    "kept_bytes": ("kept on the device", COLOURS["saved"]),
    "packed_bytes": ("moved to the store", COLOURS["restored"]),
}


def _bars(report: Report) -> str | None:
    """Draw what each region saved at its boundary so far: kept, and moved. None if nothing was saved there."""
    most = max((region.kept_bytes + region.packed_bytes for region in report.regions), default=0)
    if not most:
        return None
    unit, factor = unit_for(most)
    names = [region.name for region in report.regions]
    series = []
    for figure, (label, colour) in _SERIES.items():
        sizes = [getattr(region, figure) for region in report.regions]
        titles = [f"{name}: {label} {format_bytes(size)}" for name, size in zip(names, sizes, strict=True)]
        series.append(Series(label, colour, [size / factor for size in sizes], titles))
    return columns("boundary", names, series, unit=unit, is_stacked=True)
