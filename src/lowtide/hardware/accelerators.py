"""Accelerators: what their makers say they do.

FLOP/s are dense (without sparsity) with float32 accumulation, at 16 bits; bandwidths are peak figures in bytes per
second, the link's in one direction. Each row names its source. What kernels reach of it are `Efficiencies`: typical
values until `lowtide calibrate` has measured them on your machine.

The accelerator of this machine, for plans that name none.

What a device holds besides the caching allocator's memory: stated, not hidden in a factor.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import InvalidValueError
from lowtide.spelling import normalize, unknown
from lowtide.units import parse_bytes

if TYPE_CHECKING:
    from lowtide.simulation.costs import Cost
    from lowtide.targets.job import Job

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
    rows = {normalize(row.name): row for row in load_table()}
    if normalize(name) not in rows:
        raise InvalidValueError(unknown(name, [row.name for row in rows.values()], "accelerator"))
    found = rows[normalize(name)]
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


_OTHERS = frozenset({"laptop", "mobile", "max", "ti", "super", "d", "mig"})
"""Words after which a name means another card than without."""

_SIMILAR = {"gh200": "H200", "gb200": "B200", "l40": "L40S"}
"""Near in compute. Grace's link to its host is much faster, so offload costs less there than planned."""


def this_accelerator() -> Accelerator:
    """What is here, with the memory that it has."""
    if not torch.cuda.is_available():
        known = ", ".join(row.name for row in load_table())
        raise InvalidValueError(f"there is no GPU here to plan for: name one with device= (known: {known})")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return matched(properties.name, properties.total_memory)


def matched(name: str, memory: int) -> Accelerator:
    """The row of the table whose words a driver's name has; of several sizes, the nearest.

    `L40` is no `L4`, and a laptop's or a part of a card is another one under the same name: what is not known as
    itself is refused, since only its memory would be right.
    """
    words = set(_words(name))
    rows = [row for row in load_table() if words.issuperset(_words(row.name)) and not words & _OTHERS]
    if not rows:
        raise InvalidValueError(
            f"{name!r} is not in Lowtide's table of accelerators: name a similar one with device={_similar(words)}, "
            "and the memory of this one with budget="
        )
    longest = max(len(_words(row.name)) for row in rows)
    best = min(
        (row for row in rows if len(_words(row.name)) == longest), key=lambda candidate: abs(candidate.memory - memory)
    )
    return dataclasses.replace(best, memory=memory)


def _similar(words: set[str]) -> str:
    return next((f'"{known}"' for word, known in _SIMILAR.items() if word in words), "")


def _words(name: str) -> list[str]:
    """`A100-80GB` is told from `A100-40GB` by its memory, not by its name."""
    return [word for word in name.lower().replace("-", " ").split() if not word.endswith("gb")]


MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Margins:
    """Bytes of each, on every rank."""

    context: int
    """The driver's context and the kernels that were loaded."""
    libraries: int = 64 * MIB
    """cuBLAS' workspaces (8 MiB per handle and stream, 32 MiB on Hopper) and cuDNN's."""
    communication: int = 0
    """NCCL's channels and buffers."""

    @property
    def total(self) -> int:
        return self.context + self.libraries + self.communication


def margins_for(job: Job, accelerator: Accelerator) -> Margins:
    """The margins of a job."""
    return Margins(context=accelerator.context, communication=400 * MIB if job.ranks > 1 else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What an accelerator does per second, efficiencies included."""

    flops: float
    single_flops: float
    """In float32."""
    bandwidth: float
    matmul: float = 0.7
    attention: float = 0.55
    attention_backward: float = 0.45
    memory: float = 0.85
    """Shares of the peak that kernels reach."""

    def seconds(self, cost: Cost) -> float:
        efficiency = 1.0 if cost.kind == "memory" else getattr(self, cost.kind)
        peak = self.single_flops if cost.single_precision else self.flops
        return max(cost.flops / (peak * efficiency), cost.nbytes / (self.bandwidth * self.memory))
