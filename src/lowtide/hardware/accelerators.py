"""Accelerators in figures: a built-in table of data sheets, the device of this machine, and what a plan adds to them.

FLOP/s are dense (without sparsity) with float32 accumulation, at 16 bits; bandwidths are peak figures in bytes per
second, and the link's is for one direction. Each row of the table names its source. Kernels reach only a share of these
peaks, their `Efficiencies`: typical values until `lowtide calibrate` has measured them on your machine. `Rates` are the
two together, as a simulated clock needs them.

A device also holds memory besides the caching allocator's. That is stated as `Margins`, not hidden in a factor.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import InvalidValueError
from lowtide.spelling import normalize, unknown
from lowtide.units import parse_bytes

TERA, GIGA = 1e12, 1e9

RANKS_PER_MACHINE = 8
"""The accelerators of a DGX or HGX machine."""
KIB, MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """The shares of an accelerator's peak figures that kernels and copies reach."""

    matmul: float = 0.70
    attention: float = 0.55
    attention_backward: float = 0.45
    memory: float = 0.85
    link: float = 0.80
    network: float = 0.80
    """Of all-gathers and reduce-scatters: about 360 of 450 GB/s in NVIDIA's nccl-tests on eight H100."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """An accelerator's peak figures per second, with the shares of them that kernels reach."""

    flops: float
    """FLOP/s at 16 bits."""
    single_flops: float
    """FLOP/s in float32."""
    bandwidth: float
    """Bytes per second between the device's memory and its cores."""
    matmul: float = 0.7
    attention: float = 0.55
    attention_backward: float = 0.45
    memory: float = 0.85
    """The shares of the peaks that kernels reach, by kind of kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device, as its maker describes it."""

    name: str
    memory: int
    """Bytes that a program can use, as the driver reports them."""
    half_flops: float
    """FLOP/s at 16 bits."""
    single_flops: float
    """FLOP/s in float32: on tensor cores where training frameworks use them by default, else on plain cores."""
    bandwidth: float
    """Bytes per second between the device's memory and its cores."""
    link: float
    """Bytes per second to the host, in one direction."""
    network: float
    """Bytes per second to a peer in the same machine, in one direction."""
    fabric: float | None = None
    """Bytes per second of one rank's share in its machine's links to other machines, in one direction.

    None where no machine of the maker's says; then ranks on several machines are planned as in one.
    """
    has_flash: bool = True
    context: int = 500 * MIB
    """Bytes that the driver's context takes in each process, besides the caching allocator's."""
    blas_workspace: int = 8320 * KIB
    """Bytes that torch's caching allocator gives to each cuBLAS handle for good.

    By generation: 32 MiB on Hopper and Blackwell, 128 MiB for hipBLAS on MI300, otherwise cuBLAS' own default.
    Source: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    source: str = ""
    efficiencies: Efficiencies = Efficiencies()

    @property
    def rates(self) -> Rates:
        """Return what the device's kernels do per second."""
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

    @property
    def link_rate(self) -> float:
        """Return the bytes per second that copies to or from the host reach."""
        return self.link * self.efficiencies.link

    @property
    def is_measured(self) -> bool:
        """Return whether the efficiencies are a measurement's, and not the typical ones of the table."""
        return self.efficiencies not in (Efficiencies(), *(row.efficiencies for row in load_table()))

    @property
    def network_rate(self) -> float:
        """Return the bytes per second that exchanges with a peer reach."""
        return self.network * self.efficiencies.network

    def rate_among(self, ranks: int) -> float:
        """Return the bytes per second that exchanges among so many ranks reach, of which eight are in a machine.

        Collectives run over rings that enter each machine once, by all of its links together, so that what a rank
        gets is the slower of its peers and of the whole machine's links.
        """
        if ranks <= RANKS_PER_MACHINE or self.fabric is None:
            return self.network_rate
        return min(self.network, self.fabric * RANKS_PER_MACHINE) * self.efficiencies.network

    def budgets(self, device: int | str | None, host: int | str | None) -> tuple[int, int]:
        """Return the bytes that a plan may use on the device and on the host, for each rank.

        Unless told otherwise, that is all of the device's memory, and twice as much host memory, which most machines
        have.
        """
        budget = self.memory if device is None else parse_bytes(device)
        if budget < 1:
            raise InvalidValueError("a budget of 0 fits nothing: leave it out to use all of the device's memory")
        return budget, 2 * self.memory if host is None else parse_bytes(host)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# --- The table ------------------------------------------------------------------------------------------------------

_TABLE = Path(__file__).parent / "accelerators.json"

_FIGURES = ("half_tflops", "single_tflops", "bandwidth_gb", "link_gb", "network_gb")
"""The fields of a row that are rates, all of them positive."""


def resolve_accelerator(device: str | Accelerator | None, calibration: Path | str | None = None) -> Accelerator:
    """Return the accelerator that is named or given, or else this machine's; with a calibration file, as measured."""
    if isinstance(device, str):
        return find_accelerator(device, calibration)
    found = this_accelerator() if device is None else device
    return found if calibration is None else calibrated(found, calibration)


def find_accelerator(name: str, calibration: Path | str | None = None) -> Accelerator:
    """Look up an accelerator in the built-in table by name, in any spelling; with a calibration file, as measured."""
    rows = {normalize(row.name): row for row in load_table()}
    if normalize(name) not in rows:
        reason = unknown(name, [row.name for row in rows.values()], "accelerator")
        raise InvalidValueError(f"{reason}. --device-file takes the data sheet of another one")
    found = rows[normalize(name)]
    return found if calibration is None else calibrated(found, calibration)


def calibrated(accelerator: Accelerator, path: Path | str) -> Accelerator:
    """Return the accelerator with the efficiencies that `lowtide calibrate` measured on a device of the same name."""
    try:
        data = json.loads(Path(path).read_text())
        measured, efficiencies = data["accelerator"], Efficiencies(**data["efficiencies"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidValueError(
            f"{path} is not a calibration file ({type(error).__name__}: {error}): write one with "
            f"`lowtide calibrate -o {path}`"
        ) from error
    if measured != accelerator.name:
        raise InvalidValueError(
            f"{path} was measured on {measured}, and the plan is for {accelerator.name}: run `lowtide calibrate` "
            "there, or plan without a calibration"
        )
    return dataclasses.replace(accelerator, efficiencies=efficiencies)


def load_table() -> list[Accelerator]:
    """Read the built-in accelerators."""
    return [_from_row(row) for row in json.loads(_TABLE.read_text())]


def read_accelerator(path: Path | str) -> Accelerator:
    """Read a data sheet: a JSON object with the fields of a row of the built-in table; `source` may be left out."""
    try:
        row = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"{path} is not a data sheet ({type(error).__name__}: {error})") from error
    if not isinstance(row, dict):
        raise InvalidValueError(f"{path} is not a data sheet: it must be one JSON object, like a row of {_TABLE.name}")
    needed: dict[str, tuple[type, ...]] = {
        "name": (str,),
        "memory": (str, int),
        **dict.fromkeys(_FIGURES, (int, float)),
    }
    optional: dict[str, tuple[type, ...]] = {
        "has_flash": (bool,),
        "source": (str,),
        "blas_workspace": (str, int),
        "fabric_gb": (int, float),
    }
    for field, kinds in (needed | optional).items():
        if field not in row:
            if field in needed:
                raise InvalidValueError(f"{path}: {field!r} is missing")
            continue
        value: Any = row[field]
        if type(value) not in kinds or (field in (*_FIGURES, "fabric_gb") and value <= 0):
            raise InvalidValueError(f"{path}: {field!r} is wrong: {value!r}")
    if unused := sorted(row.keys() - needed.keys() - optional.keys()):
        raise InvalidValueError(
            f"{path}: unknown {', '.join(map(repr, unused))}; known: {', '.join(needed | optional)}"
        )
    return _from_row({"source": str(path), **row})


def _from_row(row: dict[str, Any]) -> Accelerator:
    optional: dict[str, Any] = {}
    if "blas_workspace" in row:
        optional["blas_workspace"] = parse_bytes(row["blas_workspace"])
    if "fabric_gb" in row:
        optional["fabric"] = row["fabric_gb"] * GIGA
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
        efficiencies=Efficiencies(**row.get("efficiencies", {})),
        **optional,
    )


# --- This machine's device ------------------------------------------------------------------------------------------

_VARIANT_WORDS = frozenset({"laptop", "mobile", "max", "ti", "super", "d", "mig"})
"""Words that make a card's name mean a different card."""

_SIMILAR = {"l40": "L40S", "h20": "H100"}
"""Cards that are near in compute or in memory."""


def this_accelerator() -> Accelerator:
    """Return the row of the table for this machine's GPU, with the memory that the driver reports."""
    if not torch.cuda.is_available():
        known = ", ".join(row.name for row in load_table())
        raise InvalidValueError(f"there is no GPU here to plan for: name one with device= (known: {known})")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return match_accelerator(properties.name, properties.total_memory)


def match_accelerator(name: str, memory: int) -> Accelerator:
    """Return the row of the table whose words are all in a driver's name; among rows of several sizes, the nearest.

    `L40` is not `L4`, and a laptop's card or a slice of a card is a different device under the same name. A device that
    the table does not have is refused, since of a similar row only the memory would be right.
    """
    words = set(_words(name))
    rows = [row for row in load_table() if words.issuperset(_words(row.name)) and not words & _VARIANT_WORDS]
    if not rows:
        raise InvalidValueError(
            f"{name!r} is not in Lowtide's table of accelerators: name a similar one with device={_similar(words)}, "
            "and the memory of this one with budget=, or give its data sheet with --device-file"
        )
    most_words = max(len(_words(row.name)) for row in rows)
    closest_names = (row for row in rows if len(_words(row.name)) == most_words)
    best = min(closest_names, key=lambda row: abs(row.memory - memory))
    return dataclasses.replace(best, memory=memory)


def _similar(words: set[str]) -> str:
    return next((f'"{known}"' for word, known in _SIMILAR.items() if word in words), "")


def _words(name: str) -> list[str]:
    """Split a name into words without sizes: `A100-80GB` is told from `A100-40GB` by its memory, not by its name."""
    return [word for word in name.lower().replace("-", " ").split() if not word.endswith("gb")]


# --- Margins --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Margins:
    """The bytes that every rank's device holds besides the caching allocator's memory."""

    context: int
    """The driver's context and the kernels that were loaded."""
    communication: int = 0
    """NCCL's channels and buffers."""

    @property
    def total(self) -> int:
        return self.context + self.communication


def margins_for(accelerator: Accelerator, ranks: int) -> Margins:
    """Return the margins of one of `ranks` processes; a single process has no communication buffers."""
    return Margins(context=accelerator.context, communication=400 * MIB if ranks > 1 else 0)
