"""Two runs' gradients side by side, told apart from rounding noise.

Equal bits need no tolerance. Where the arithmetic has another order (tiles, fused kernels), a gradient may differ by
rounding; the floor is taken from the largest gradient of the model and from what the reference's own rerun differs by.
A gradient that is None in one run and zero in the other is the same gradient: an expert that no token chose.
"""

from __future__ import annotations

import dataclasses
import zlib

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Relative, by dtype: a few hundred roundings for single and double precision, a few for half."""

NOISE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative to the model's largest gradient: below it a gradient is rounding."""

_TINY = 1e-30


@dataclasses.dataclass
class Comparison:
    """How a candidate's gradients differ from the reference's."""

    lost: list[str] = dataclasses.field(default_factory=list)
    """The reference has a gradient, the candidate None or zero."""
    gained: list[str] = dataclasses.field(default_factory=list)
    different: dict[str, float] = dataclasses.field(default_factory=dict)
    """Relative errors beyond the tolerance."""
    noise: list[str] = dataclasses.field(default_factory=list)
    """Differ, but no more than rounding."""
    identical: bool = True
    largest_error: float = 0.0

    @property
    def suspects(self) -> list[str]:
        return [*self.lost, *self.gained, *self.different]

    def acquit(self, names: set[str]) -> None:
        """Take names out: their true gradient is zero, what was compared is rounding."""
        self.lost = [name for name in self.lost if name not in names]
        self.gained = [name for name in self.gained if name not in names]
        self.different = {name: error for name, error in self.different.items() if name not in names}


def compare(
    expected: dict[str, Tensor | None], found: dict[str, Tensor | None], own_errors: dict[str, float]
) -> Comparison:
    """`own_errors`: what the reference differs by from its own rerun."""
    result = Comparison()
    largest = largest_of(expected)
    for name, reference in expected.items():
        candidate = found.get(name)
        if is_nothing(reference) and is_nothing(candidate):
            continue
        if reference is not None and candidate is not None and _same_bits(reference, candidate):
            continue
        result.identical = False
        floor = _floor(largest, reference, candidate)
        _judge(result, name, reference, candidate, floor=floor, own=own_errors.get(name, 0.0))
    return result


def _judge(
    result: Comparison, name: str, reference: Tensor | None, candidate: Tensor | None, *, floor: float, own: float
) -> None:
    size, difference = size_of(reference), _difference(reference, candidate)
    if difference <= floor:
        result.largest_error = max(result.largest_error, difference / max(size, floor))
        result.noise.append(name)
        return
    if is_nothing(candidate):
        result.lost.append(name)
        return
    if is_nothing(reference):
        result.gained.append(name)
        return
    error = difference / max(size, _TINY)  # no finite number but zero beside NaN: a size of zero
    result.largest_error = max(result.largest_error, error)
    if error > max(TOLERANCES.get(_dtype(reference, candidate), 1e-4), 4 * own):
        result.different[name] = error
    else:
        result.noise.append(name)


def errors_of(expected: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> dict[str, float]:
    """Relative errors by name, for a tolerance by name. Of a gradient that is rounding they may be as large as one."""
    return {
        name: _difference(reference, found.get(name)) / max(size_of(reference), _TINY)
        for name, reference in expected.items()
        if not is_nothing(reference)
    }


def error_beyond_rounding(expected: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> float:
    """The largest relative error, without differences that are rounding beside the model's largest gradient: a gradient
    that is zero by mathematics differs by all of itself from run to run, and says nothing about the others."""
    largest = largest_of(expected)
    counted: dict[str, Tensor | None] = {
        name: reference
        for name, reference in expected.items()
        if reference is not None and _difference(reference, found.get(name)) > _floor(largest, reference)
    }
    return max(errors_of(counted, found).values(), default=0.0)


def _floor(largest: float, *gradients: Tensor | None) -> float:
    """A difference up to this is rounding."""
    return NOISE.get(_dtype(*gradients), 1e-6) * largest


def largest_of(gradients: dict[str, Tensor | None]) -> float:
    return max((size_of(gradient) for gradient in gradients.values()), default=0.0)


def is_nothing(gradient: Tensor | None) -> bool:
    """None or zero, which is the same gradient."""
    return gradient is None or not bool(gradient.any())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(torch.equal(_finite(one), _finite(other)) and _same_holes(one, other))


def _same_holes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_holes(one), _holes(other))


def _holes(tensor: Tensor) -> Tensor:
    """Where there is no finite number, and of which kind."""
    real = _as_real(tensor)
    return torch.stack([torch.isnan(real), torch.isposinf(real), torch.isneginf(real)])


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _finite(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def size_of(tensor: Tensor | None) -> float:
    """The largest of the finite numbers."""
    return 0.0 if tensor is None or not tensor.numel() else float(_finite(tensor).abs().max())


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:  # none is zero, and zero is finite
        there = other if one is None else one
        return size_of(there) if there is None or bool(torch.isfinite(there).all()) else float("inf")
    if not _same_holes(one, other):
        return float("inf")
    return size_of(_finite(_as_real(one)).double() - _finite(_as_real(other)).double())


def _dtype(*gradients: Tensor | None) -> torch.dtype:
    return next(gradient.dtype for gradient in gradients if gradient is not None)


def checksum(tensor: Tensor) -> int:
    """Of all bits, so that what is compared need not be kept or sent."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(raw.tobytes())
