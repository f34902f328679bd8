"""Accelerators: what their makers say they do.

FLOP/s are dense (without sparsity) with float32 accumulation, at 16 bits; bandwidths are peak figures in bytes per
second, the link's in one direction. Each row names its source. What kernels reach of it are `Efficiencies`: typical
values until `lowtide calibrate` has measured them on your machine.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lowtide.errors import InvalidValueError
from lowtide.planning.blank.costs import Rates
from lowtide.spelling import plain, unknown
from lowtide.units import parse_bytes

TERA, GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Shares of the peak that are reached."""

    matmul: float = 0.70
    attention: float = 0.55
    attention_backward: float = 0.45
    memory: float = 0.85
    link: float = 0.80


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device."""

    name: str
    memory: int
    """Bytes that a program can use, as the driver reports them."""
    half_flops: float
    single_flops: float
    """In float32: on tensor cores where training frameworks use them by default, else on plain cores."""
    bandwidth: float
    link: float
    """To the host, one direction."""
    network: float
    """To a peer in the same machine, one direction."""
    has_flash: bool = True
    context: int = 500 * 2**20
    """Bytes that the driver's context takes in each process, besides the caching allocator's."""
    source: str = ""
    efficiencies: Efficiencies = Efficiencies()

    @property
    def rates(self) -> Rates:
        reached = self.efficiencies
        return Rates(
            flops=self.half_flops,
            single_flops=self.single_flops,
            bandwidth=self.bandwidth,
            matmul=reached.matmul,
            attention=reached.attention,
            attention_backward=reached.attention_backward,
            memory=reached.memory,
        )

    def budgets(self, device: int | str | None, host: int | str | None) -> tuple[int, int]:
        """Bytes to use, of the device and of the host. Unless a plan is told: all of the one, twice as much of the
        other for each rank, which most machines have."""
        budget = self.memory if device is None else parse_bytes(device)
        if budget < 1:
            raise InvalidValueError("a budget of 0 fits nothing: leave it out for all of the device's memory")
        return budget, 2 * self.memory if host is None else parse_bytes(host)

    @property
    def link_rate(self) -> float:
        return self.link * self.efficiencies.link

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def find_accelerator(name: str, calibration: Path | str | None = None) -> Accelerator:
    """An accelerator by its name, in any spelling; with a calibration file, as measured."""
    rows = {plain(row.name): row for row in load_table()}
    if plain(name) not in rows:
        raise InvalidValueError(unknown(name, [row.name for row in rows.values()], "accelerator that Lowtide knows"))
    found = rows[plain(name)]
    return found if calibration is None else calibrated(found, calibration)


def calibrated(accelerator: Accelerator, path: Path | str) -> Accelerator:
    """The accelerator with the efficiencies that `lowtide calibrate` wrote down, on one of the same name."""
    try:
        data = json.loads(Path(path).read_text())
        measured, efficiencies = data["accelerator"], Efficiencies(**data["efficiencies"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidValueError(
            f"{path} is no calibration ({type(error).__name__}: {error}): write one with `lowtide calibrate -o {path}`"
        ) from error
    if measured != accelerator.name:
        raise InvalidValueError(
            f"{path} was measured on {measured}, and the plan is for {accelerator.name}: run `lowtide calibrate` "
            "there, or plan without a calibration"
        )
    return dataclasses.replace(accelerator, efficiencies=efficiencies)


def load_table() -> list[Accelerator]:
    """The built-in accelerators."""
    rows = json.loads((Path(__file__).parent / "accelerators.json").read_text())
    return [_from_row(row) for row in rows]


def _from_row(row: dict[str, Any]) -> Accelerator:
    return Accelerator(
        name=row["name"],
        memory=parse_bytes(row["memory"]),
        half_flops=row["half_tflops"] * TERA,
        single_flops=row["single_tflops"] * TERA,
        bandwidth=row["bandwidth_gb"] * GIGA,
        link=row["link_gb"] * GIGA,
        network=row["network_gb"] * GIGA,
        has_flash=row.get("has_flash", True),
        source=row["source"],
    )
