"""Compares what calls leave in a module: in its buffers, and as tensors in its plain attributes.

Contents are compared, not versions: a buffer may be written through `.data`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lowtide._torch import CONTENT, version_of
from lowtide.tensor_tree import flatten

if TYPE_CHECKING:
    from torch import nn

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3}
_LOW_PRECISION = 1.5e-2


class Left(NamedTuple):
    """What a module holds after a call: all its buffers, and the tensors in those attributes that have changed."""

    buffers: dict[str, torch.Tensor]
    attributes: dict[str, list[torch.Tensor]]


class Remains:
    """Knows what a module held before its calls, and tells what they left."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._held = self._attributes()  # kept, for the identity of a tensor that is gone may be another's
        self._marks = {name: _marks(tensors) for name, tensors in self._held.items()}
        self.before = self._buffers()

    def now(self) -> Left:
        """Return copies of what the module holds now."""
        changed = {name: ts for name, ts in self._attributes().items() if _marks(ts) != self._marks.get(name)}
        return Left(self._buffers(), {name: [t.detach().clone() for t in ts] for name, ts in changed.items()})

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {} if self._module is None else {name: buffer.clone() for name, buffer in self._module.named_buffers()}

    def _attributes(self) -> dict[str, list[torch.Tensor]]:
        return {
            f"{path}.{name}".strip("."): tensors
            for path, part in ([] if self._module is None else self._module.named_modules())
            for name, value in vars(part).items()
            if name not in CONTENT and (tensors := flatten(value)[0])
        }


def _marks(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return identities and versions; inference tensors have no version."""
    return [(id(tensor), 0 if tensor.is_inference() else version_of(tensor)) for tensor in tensors]


def different_buffer(before: dict[str, torch.Tensor], one: Left, two: Left) -> str | None:
    """Return the name of a buffer that two ways to run the same tokens leave differently, if there is one."""
    names = one.buffers | two.buffers
    same = (_is_same_update(before.get(name), one.buffers.get(name), two.buffers.get(name)) for name in names)
    return next((name for name, is_same in zip(names, same, strict=True) if not is_same), None)


def different_attribute(left: list[Left]) -> str | None:
    """Return the name of an attribute that holds another tensor after each of some calls, if there is one."""
    names = {name: None for each in left for name in each.attributes}
    first, *others = left
    for name in names:
        if not all(_are_same(first.attributes.get(name), other.attributes.get(name)) for other in others):
            return name
    return None


def _is_same_update(before: torch.Tensor | None, one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    """Return whether two runs changed a buffer alike. A table may be made longer by one of them than by the other."""
    if one is None or two is None or one.dim() != two.dim() or one.dtype != two.dtype:
        return False
    both = tuple(slice(0, min(sizes)) for sizes in zip(one.shape, two.shape, strict=True))
    one, two = one[both], two[both]
    if _are_same([one], [two]):
        return True
    if before is None or before.shape != one.shape or not one.is_floating_point():
        return False
    # Sums over tokens are rounded: equal are those that differ by less than the update, and the buffer, can resolve.
    start, one, two = before.double(), one.double(), two.double()
    rounding = 2 * torch.finfo(before.dtype).eps * torch.maximum(one.abs(), two.abs())
    bound = _TOLERANCE.get(before.dtype, _LOW_PRECISION) * torch.maximum((one - start).abs(), (two - start).abs()).max()
    return bool(((one - two).abs() <= torch.maximum(bound, rounding)).all())


def _are_same(ours: list[torch.Tensor] | None, others: list[torch.Tensor] | None) -> bool:
    if ours is None or others is None or len(ours) != len(others):
        return False
    pairs = zip(ours, others, strict=True)
    return all(one.shape == two.shape and torch.equal(_as_bytes(one), _as_bytes(two)) for one, two in pairs)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a plain tensor, for NaN is not equal to itself."""
    return tensor.reshape(-1).view(torch.uint8) if type(tensor) is torch.Tensor else tensor


def are_far_apart(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two results differ by more than rounding; infinities and NaN prove nothing."""
    if not one.is_floating_point():
        return not torch.equal(one, two)
    if not (torch.isfinite(one).all() and torch.isfinite(two).all()):
        return False
    scale = torch.maximum(one.double().norm(), two.double().norm())
    return bool((one.double() - two.double()).norm() > tolerance_of(one) * scale)


def tolerance_of(result: torch.Tensor) -> float:
    """Return by how much two results of this type may differ through rounding, relative to their size."""
    if result.dtype is torch.float32 and result.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return _TOLERANCE[torch.float16]
    return _TOLERANCE.get(result.dtype, _LOW_PRECISION)
