"""Names the parts of a model: modules, parameters and buffers without what wrappers add, and groups of neighbours.

Wrappers (DDP, torch's checkpoint and FSDP1 wrappers, `torch.compile`) add words to names. Only without these words can
two set-ups of one model be compared, and a report be read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)(?:\.|$)")
_NUMBERED = re.compile(r"(?P<before>.*?)(?P<number>\d+)(?P<after>\D*)$")


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, whose names are the ones people know; return any other model as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def unwrap_checkpoint(module: nn.Module) -> nn.Module:
    """Return the module inside torch's `CheckpointWrapper`; return any other module as it is."""
    wrapped = getattr(module, "_checkpoint_wrapped_module", None)
    return wrapped if isinstance(wrapped, nn.Module) else module


def plain_name(name: str) -> str:
    """Remove what wrappers add: `layers._checkpoint_wrapped_module.0.weight` becomes `layers.0.weight`."""
    return _WRAPPERS.sub("", name).rstrip(".")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, by its plain name. A wrapper shares that name with what it wraps, which is yielded."""
    found = {plain_name(name): module for name, module in unwrap_ddp(model).named_modules()}
    return iter(found.items())


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter by its plain name."""
    return ((plain_name(name), parameter) for name, parameter in unwrap_ddp(model).named_parameters())


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every buffer by its plain name."""
    return ((plain_name(name), buffer) for name, buffer in unwrap_ddp(model).named_buffers())


def ancestors(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, innermost first: `a.b.c` lies in `a.b` and in `a`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def stack_of(name: str) -> tuple[str, ...]:
    """Split a name around its last number: neighbours in one stack have the same two parts."""
    match = _NUMBERED.match(name)
    return (match["before"], match["after"]) if match else (name,)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def grouped_name(group: Sequence[_Named]) -> str:
    """Name the neighbours of one stack in one word, such as `layers.0-35 x36`."""
    first, last = (_NUMBERED.match(group[place].name) for place in (0, -1))
    if len(group) == 1 or first is None or last is None:
        return group[0].name
    return f"{first['before']}{first['number']}-{last['number']}{first['after']} x{len(group)}"


def range_of(group: Sequence[object], figure: str) -> str:
    """Format one attribute of neighbours in bytes: as one size, or as the smallest and the largest."""
    values = sorted(getattr(region, figure) for region in group)
    if values[0] == values[-1]:
        return format_bytes(values[0])
    return f"{format_bytes(values[0])} to {format_bytes(values[-1])}"
