"""Whole tensors that are filled tile by tile: outputs in forward, gradients of inputs in backward.

Joining all tiles at the end would hold everything twice. So a tile's output is copied into the whole as soon as it is
there, and a stand-in takes its place in the graph: a tensor of the same shape without memory. The node that hands out
the whole is connected to the stand-ins, and gives each its part of the gradient. Input gradients land the same way, the
other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import graph_task_id
from lowtide.errors import NotTokenWiseError
from lowtide.tensor_tree import flatten

if TYPE_CHECKING:
    from lowtide.tensor_tree import TensorTree
    from lowtide.tiling.tile import TokenGrid


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)  # not empty: anomaly detection looks for NaN


class _StoreTile(torch.autograd.Function):
    """A tile's output -> its stand-in, after it was copied."""

    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        place.copy_(output)
        return _stand_in(output)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Assemble(torch.autograd.Function):
    """Stand-ins -> the whole that they stand for."""

    @staticmethod
    def forward(ctx: Any, column: _Column, *_stand_ins: torch.Tensor) -> torch.Tensor:
        ctx.parts = column.parts_of
        return column.whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *ctx.parts(gradients[0])


class Outputs:
    """The outputs of a call, tensor by tensor; any nesting, each tensor with a row per token."""

    def __init__(self, grid: TokenGrid, name: str) -> None:
        self._grid = grid
        self._name = name
        self._tree: TensorTree | None = None
        self._columns: list[_Column] = []

    def add(self, index: int, output: Any) -> None:
        """What one tile gave."""
        tensors, tree = flatten(output)
        if self._tree is None:
            self._tree = tree
            self._columns = [
                _Column(self._grid, tensor, f"{self._name}: output {number}") for number, tensor in enumerate(tensors)
            ]
        if len(tensors) != len(self._columns):
            raise NotTokenWiseError(
                f"{self._name} cannot be tiled: its tiles return different numbers of tensors. Only token-wise "
                "functions can be"
            )
        for column, tensor in zip(self._columns, tensors, strict=True):
            column.put(index, tensor)

    def finished(self) -> Any:
        return self._tree.unflatten(tuple(column.finished() for column in self._columns))  # type: ignore[union-attr]


class _Column:
    """One tensor of the outputs."""

    def __init__(self, grid: TokenGrid, first: torch.Tensor, name: str) -> None:
        self._grid = grid
        self._name = name
        self._has_batch = first.shape[: grid.dim + 1] == (*grid.flat_lead[:-1], grid.sizes[0])
        self._dim = grid.dim if self._has_batch else 0  # flattened by the module itself, as router logits are
        if first.shape[: self._dim + 1][-1:] != (grid.sizes[0],):
            raise self._refusal(first, 0)
        shape = list(first.shape)
        shape[self._dim] = grid.count
        self.whole = first.new_empty(shape)
        self._stand_ins: list[tuple[int, torch.Tensor]] = []

    def put(self, index: int, output: torch.Tensor) -> None:
        place = self._grid.part(self.whole, index, self._dim)
        if output.shape != place.shape or output.dtype != place.dtype:
            raise self._refusal(output, index)
        if output.requires_grad:
            self._stand_ins.append((index, _StoreTile.apply(output, place)))  # type: ignore[no-untyped-call]
        else:
            place.copy_(output)

    def parts_of(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        return [self._grid.part(gradient, index, self._dim) for index, _ in self._stand_ins]

    def finished(self) -> torch.Tensor:
        whole = self.whole
        if self._stand_ins:
            whole = _Assemble.apply(self, *(stand_in for _, stand_in in self._stand_ins))  # type: ignore[no-untyped-call]
        del self.whole
        self._stand_ins = [(index, whole.new_empty(0)) for index, _ in self._stand_ins]
        return whole.reshape(*self._grid.lead, *whole.shape[self._dim + 1 :]) if self._has_batch else whole

    def _refusal(self, output: torch.Tensor, index: int) -> NotTokenWiseError:
        return NotTokenWiseError(
            f"{self._name} has the shape {tuple(output.shape)} for {self._grid.sizes[index]} tokens: no dimension that "
            "counts tokens. Only token-wise functions can be tiled: reduce over tokens outside of it"
        )


class GradBuffer:
    """The gradient of one input, filled by its tiles in one backward."""

    def __init__(self, grid: TokenGrid, tensor: torch.Tensor) -> None:
        self._grid = grid
        self._shape = tensor.shape
        self._whole: torch.Tensor | None = None
        self._backward = -1
        self._landed: set[int] = set()

    def put(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Copy a tile's gradient to its place; its stand-in goes on. A graph of gradients needs the thing itself."""
        if torch.is_grad_enabled():
            return gradient
        backward = graph_task_id()
        if self._whole is None or self._backward != backward:
            self._whole = gradient.new_empty(*self._grid.flat_lead, *self._shape[len(self._grid.lead) :])
            self._backward, self._landed = backward, set()
        self._grid.part(self._whole, index, self._grid.dim).copy_(gradient)
        self._landed.add(index)
        return _stand_in(gradient)

    def take(self, gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
        """The whole gradient, from what the tiles' nodes were given for it."""
        whole, self._whole = self._whole, None
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None
        if whole is None:
            sizes = [
                [*present[0].shape[: self._grid.dim], size, *present[0].shape[self._grid.dim + 1 :]]
                for size in self._grid.sizes
            ]
            pairs = zip(gradients, sizes, strict=True)
            whole = torch.cat([present[0].new_zeros(size) if g is None else g for g, size in pairs], self._grid.dim)
        else:
            for index in set(range(len(gradients))) - self._landed:
                self._grid.part(whole, index, self._grid.dim).zero_()
        return whole.reshape(self._shape)


class GradSlice(torch.autograd.Function):
    """A tile of an input, whose gradient lands in the whole."""

    @staticmethod
    def forward(ctx: Any, landing: GradBuffer, index: int, tile: torch.Tensor) -> torch.Tensor:
        ctx.landing, ctx.index = landing, index
        return tile.view_as(tile)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, ctx.landing.put(ctx.index, gradients[0])
