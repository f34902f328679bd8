"""Compares the gradients of two runs, and tells a wrong gradient from rounding.

Equal bits need no tolerance. Where the arithmetic has a different order (tiles, fused kernels), a gradient may differ
by rounding: the noise floor is taken from the model's largest gradient, and the tolerance from the dtype and from how
much the reference differs from its own rerun. What exceeds that may still be rounding, in a model that amplifies it:
the gradients in double precision tell, from which a right run is about as far as the reference.

A gradient that is None in one run and zero in the other is the same gradient: an expert that no token chose.
"""

from __future__ import annotations

import dataclasses
import statistics
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

Gradients = dict[str, Tensor | None]
"""Gradients by parameter name."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Relative, by dtype: a few hundred roundings for single and double precision, a few for half."""

NOISE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative to the model's largest gradient: a gradient below it is rounding."""

_OWN_ERROR = 0.02
"""The relative error up to which double precision computes the same thing: with other dropout or routing, it is 1."""

_FARTHER = 3.0
"""How many times as far from the true gradient another rounding of it may be."""

_TINY = 1e-30


@dataclasses.dataclass
class Comparison:
    """How a candidate's gradients differ from the reference's."""

    lost: list[str] = dataclasses.field(default_factory=list)
    """The reference has a gradient; the candidate has None or zero."""
    gained: list[str] = dataclasses.field(default_factory=list)
    """The candidate has a gradient; the reference has None or zero."""
    different: dict[str, float] = dataclasses.field(default_factory=dict)
    """Relative errors beyond the tolerance."""
    noise: list[str] = dataclasses.field(default_factory=list)
    """Differ, but by no more than rounding."""
    identical: bool = True
    largest_error: float = 0.0

    @property
    def suspects(self) -> list[str]:
        return [*self.lost, *self.gained, *self.different]

    def acquit(self, names: set[str]) -> None:
        """Remove names from the suspects, such as those whose true gradient is zero: what was compared is rounding."""
        self.lost = [name for name in self.lost if name not in names]
        self.gained = [name for name in self.gained if name not in names]
        self.different = {name: error for name, error in self.different.items() if name not in names}


def compare(expected: Gradients, found: Gradients, rerun_errors: dict[str, float]) -> Comparison:
    """Compare gradients name by name. `rerun_errors` says by how much the reference differs from its own rerun."""
    result = Comparison()
    largest = largest_gradient(expected)
    for name, reference in expected.items():
        candidate = found.get(name)
        if is_none_or_zero(reference) and is_none_or_zero(candidate):
            continue
        if reference is not None and candidate is not None and _same_bits(reference, candidate):
            continue
        result.identical = False
        floor = _noise_floor(largest, reference, candidate)
        _classify(result, name, reference, candidate, floor=floor, rerun_error=rerun_errors.get(name, 0.0))
    return result


def _classify(
    result: Comparison,
    name: str,
    reference: Tensor | None,
    candidate: Tensor | None,
    *,
    floor: float,
    rerun_error: float,
) -> None:
    size, difference = max_abs(reference), _max_difference(reference, candidate)
    if difference <= floor:
        result.largest_error = max(result.largest_error, difference / max(size, floor))
        result.noise.append(name)
        return
    if is_none_or_zero(candidate):
        result.lost.append(name)
        return
    if is_none_or_zero(reference):
        result.gained.append(name)
        return
    error = difference / max(size, _TINY)  # a reference whose only finite numbers are zeros has size zero
    result.largest_error = max(result.largest_error, error)
    if error > max(TOLERANCES.get(_dtype(reference, candidate), 1e-4), 4 * rerun_error):
        result.different[name] = error
    else:
        result.noise.append(name)


def as_near(true: Gradients, expected: Gradients, found: Gradients, names: Iterable[str]) -> set[str]:
    """Return which of these names have a gradient that is about as near to the true one as the reference's are.

    The reference's error is that of the same gradient, or the median of its gradients if that is more: one number may
    be rounded to the true one by luck.
    """
    own = _distances(true, expected)
    typical = statistics.median(own.values()) if own else 0.0
    other = _distances(true, {name: found.get(name) for name in names})
    return {
        name
        for name, distance in other.items()
        if own.get(name, 1.0) <= _OWN_ERROR and distance <= _FARTHER * max(own[name], min(typical, _OWN_ERROR))
    }


def as_rounded(rounding: dict[str, float], different: dict[str, float]) -> set[str]:
    """Return which gradients differ by about as much as the last bits of the weights make them differ.

    With such a change, another expert may be chosen: what moves a gradient by more than a little says nothing.
    """
    return {
        name
        for name, error in different.items()
        if rounding.get(name, 0.0) <= _OWN_ERROR and error <= _FARTHER * rounding.get(name, 0.0)
    }


def _distances(true: Gradients, gradients: Gradients) -> dict[str, float]:
    """Return how far gradients are from the true ones, relative to these."""
    return {
        name: float((gradient.to(reference.device).to(reference.dtype) - reference).norm() / size)
        for name, gradient in gradients.items()
        if gradient is not None and (reference := true.get(name)) is not None and (size := reference.norm()) > 0
    }


def relative_errors(expected: Gradients, found: Gradients) -> dict[str, float]:
    """Return relative errors by name. The error of a gradient that is nothing but rounding may be one or more."""
    return {
        name: _max_difference(reference, found.get(name)) / max(max_abs(reference), _TINY)
        for name, reference in expected.items()
        if not is_none_or_zero(reference)
    }


def error_beyond_rounding(expected: Gradients, found: Gradients) -> float:
    """Return the largest relative error among differences that exceed the noise floor of the model's largest gradient.

    Without the floor, a gradient that is mathematically zero would set the figure: it differs by all of itself from
    run to run, and says nothing about the rest.
    """
    largest = largest_gradient(expected)
    counted: Gradients = {
        name: reference
        for name, reference in expected.items()
        if reference is not None and _max_difference(reference, found.get(name)) > _noise_floor(largest, reference)
    }
    return max(relative_errors(counted, found).values(), default=0.0)


def largest_gradient(gradients: Gradients) -> float:
    """Return the largest finite magnitude in all gradients."""
    return max((max_abs(gradient) for gradient in gradients.values()), default=0.0)


def is_none_or_zero(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())


def max_abs(tensor: Tensor | None) -> float:
    """Return the largest magnitude among the finite numbers; 0 for None and for an empty tensor."""
    return 0.0 if tensor is None or not tensor.numel() else float(_finite(tensor).abs().max())


def in_double(tensor: Tensor) -> Tensor:
    """Return the numbers in double precision; those of Apple's GPUs, which have none, on the CPU."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def checksum(tensor: Tensor) -> int:
    """Return a checksum of all bits, so that tensors can be compared without being kept or sent."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(raw.tobytes())


def _noise_floor(largest: float, *gradients: Tensor | None) -> float:
    return NOISE.get(_dtype(*gradients), 1e-6) * largest


def _dtype(*gradients: Tensor | None) -> torch.dtype:
    return next(gradient.dtype for gradient in gradients if gradient is not None)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(torch.equal(_finite(one), _finite(other)) and _same_nonfinite(one, other))


def _max_difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the largest difference; infinity where only one of the two is finite. None counts as zeros."""
    if one is None or other is None:
        present = other if one is None else one
        return max_abs(present) if present is None or bool(torch.isfinite(present).all()) else float("inf")
    if not _same_nonfinite(one, other):
        return float("inf")
    return max_abs(in_double(_finite(_as_real(one))) - in_double(_finite(_as_real(other))))


def _same_nonfinite(one: Tensor, other: Tensor) -> bool:
    """Return whether NaN, infinity and minus infinity are in the same places."""
    return torch.equal(_nonfinite(one), _nonfinite(other))


def _nonfinite(tensor: Tensor) -> Tensor:
    real = _as_real(tensor)
    return torch.stack([torch.isnan(real), torch.isposinf(real), torch.isneginf(real)])


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _finite(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
