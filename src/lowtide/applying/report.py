"""What a policy did, as data; printed with equal neighbours in one line (`layers.0-35 x36`)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.measure import RegionLedger


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
    host_bytes: int
    peak_host_bytes: int
    seconds_waited: float
    """How long compute waited for copies."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = [f"policy {self.policy}: {len(self.regions)} regions"]
        for _, neighbours in itertools.groupby(self.regions, key=_likeness):
            group = list(neighbours)
            first = group[0]
            lines.append(
                f"  {_grouped_name(group)} [{first.policy}] forwards {first.forwards}, recomputes {first.recomputes}, "
                f"packed {_range(group, 'packed_bytes')}, restored {_range(group, 'restored_bytes')}, "
                f"kept {_range(group, 'kept_bytes')}"
            )
        declined = sum(region.declined_bytes for region in self.regions)
        lines.append(
            f"  host memory {format_bytes(self.host_bytes)} now, {format_bytes(self.peak_host_bytes)} at the peak; "
            f"compute waited {self.seconds_waited * 1e3:.1f} ms for copies"
        )
        if declined:
            lines.append(f"  {format_bytes(declined)} found no room in host memory and stayed on the device")
        return "\n".join(lines)


_NUMBERED = re.compile(r"(?P<before>.*?)(?P<number>\d+)$")


def _likeness(region: RegionReport) -> tuple[Any, ...]:
    match = _NUMBERED.match(region.name)
    return (match["before"] if match else region.name, region.policy, region.forwards, region.recomputes)


def _grouped_name(group: list[RegionReport]) -> str:
    if len(group) == 1:
        return group[0].name
    last = _NUMBERED.match(group[-1].name)
    return f"{group[0].name}-{last['number'] if last else group[-1].name} x{len(group)}"


def _range(group: list[RegionReport], figure: str) -> str:
    values = sorted(getattr(region, figure) for region in group)
    if values[0] == values[-1]:
        return format_bytes(values[0])
    return f"{format_bytes(values[0])} to {format_bytes(values[-1])}"
