"""Shapes of results that torch's meta kernels refuse to tell, though the real kernels run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """The products of experts. torch's own only knows bfloat16, which is a limit of one GPU kernel."""
    if left.dim() == right.dim() == 2:  # noqa: PLR2004  (the gradient of the weights: one matrix per expert)
        assert offs is not None  # noqa: S101  (two matrices are grouped along the dimension that they share)
        return left.new_empty(offs.numel(), left.shape[0], right.shape[1])
    if left.dim() == right.dim():
        return left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    if left.dim() == 2:  # noqa: PLR2004
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(left.shape[1], right.shape[1])


RESULTS: dict[Any, Callable[..., torch.Tensor]] = {aten._grouped_mm: _grouped_mm}
