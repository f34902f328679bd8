"""Lets a model compute in another precision than its code says: in double, or with other last bits in its weights.

`model.double()` alone is not enough: transformers' norms, rotary embeddings and losses ask for float32 by name, and
round everything that passes through them. `InDouble` gives them double precision instead.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide._torch import pytree
from lowtide.modules import device_of

if TYPE_CHECKING:
    from torch import nn

    from lowtide.auditing.step import Experiment

_LOWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (Tensor.float, Tensor.bfloat16, Tensor.half)
_OF_BITS = (Tensor.view,)
"""Functions that take a dtype to read bits by, not numbers."""


class InDouble(TorchFunctionMode):
    """Takes double precision where a model's code asks for a lower one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        if func not in _OF_BITS:
            args = tuple(map(_double_dtype, args))
            kwargs = {name: _double_dtype(value) for name, value in (kwargs or {}).items()}
        result = func(*args, **(kwargs or {}))
        made = isinstance(result, Tensor) and result.dtype is torch.float32
        return result.double() if made and not _are_floats(args) else result  # made of nothing, or of integers


def _double_dtype(value: Any) -> Any:
    return torch.double if isinstance(value, torch.dtype) and value in _LOWER else value


def _are_floats(args: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in args)


def in_double(model: nn.Module, experiment: Experiment) -> tuple[nn.Module, Experiment]:
    """Put a model and its batch into double precision; those on Apple's GPUs, which have none, on the CPU."""
    has_none = device_of(model).type == "mps"

    def double(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.cpu() if has_none else value
        return value.double() if value.is_floating_point() else value

    batch = pytree.tree_map(double, experiment.batch)
    return (model.cpu() if has_none else model).double(), dataclasses.replace(experiment, batch=batch)


def spacing(number: Tensor) -> float:
    """Return how far the next number of this dtype is away."""
    return float((torch.nextafter(number.abs(), torch.full_like(number, float("inf"))) - number.abs()).abs())


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    """Move every weight to the next number above or below it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel():
            signs = torch.randint(2, parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, (2 * signs - 1) * float("inf")))
