"""Fills full tensors tile by tile: outputs in forward, the gradients of inputs in backward.

Concatenating all tiles at the end would hold everything twice. So a tile's output is copied into the full output as
soon as it is there, and a placeholder takes its place in the graph: a tensor of the same shape without memory. The node
that returns the full output (`_Assemble`) is connected to the placeholders, and gives each its part of the gradient.
The gradients of inputs are collected the same way in the other direction: each tile writes its part into a
`GradBuffer`, and a placeholder flows on.
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


class Outputs:
    """Collects the outputs of a call from its tiles; any nesting, each tensor with a row per token."""

    def __init__(self, grid: TokenGrid, name: str) -> None:
        self._grid = grid
        self._name = name
        self._tree: TensorTree | None = None
        self._tensors: list[_Output] = []

    def add(self, index: int, output: Any) -> None:
        """Add what one tile returned."""
        tensors, tree = flatten(output)
        if self._tree is None:
            self._tree = tree
            self._tensors = [
                _Output(self._grid, tensor, f"{self._name}: output {number}") for number, tensor in enumerate(tensors)
            ]
        if len(tensors) != len(self._tensors):
            raise NotTokenWiseError(
                f"{self._name} cannot be tiled: its tiles return different numbers of tensors. Only token-wise "
                "functions can be tiled"
            )
        for output_tensor, tensor in zip(self._tensors, tensors, strict=True):
            output_tensor.add(index, tensor)

    def assemble(self) -> Any:
        """Return the outputs of the whole call."""
        return self._tree.unflatten(tuple(tensor.assemble() for tensor in self._tensors))  # type: ignore[union-attr]


class _Output:
    """One tensor of the outputs."""

    def __init__(self, grid: TokenGrid, first: torch.Tensor, name: str) -> None:
        self._grid = grid
        self._name = name
        self._has_batch = first.shape[: grid.dim + 1] == (*grid.flat_lead[:-1], grid.sizes[0])
        self._dim = grid.dim if self._has_batch else 0  # flattened by the module itself, as router logits are
        if first.shape[: self._dim + 1][-1:] != (grid.sizes[0],):
            raise self._shape_error(first, 0)
        shape = list(first.shape)
        shape[self._dim] = grid.count
        self.full = first.new_empty(shape)
        self._placeholders: list[tuple[int, torch.Tensor]] = []

    def add(self, index: int, output: torch.Tensor) -> None:
        part = self._grid.part(self.full, index, self._dim)
        if output.dtype != part.dtype:
            raise NotTokenWiseError(
                f"{self._name} is {output.dtype} for tile {index} and {part.dtype} for the first one. Only token-wise "
                "functions can be tiled: return one type, whatever the tokens"
            )
        if output.shape != part.shape:
            raise self._shape_error(output, index)
        if output.requires_grad:
            self._placeholders.append((index, _StoreTile.apply(output, part)))  # type: ignore[no-untyped-call]
        else:
            part.copy_(output)

    def split_gradient(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of the full output's gradient for the tiles that need one."""
        return [self._grid.part(gradient, index, self._dim) for index, _ in self._placeholders]

    def assemble(self) -> torch.Tensor:
        full = self.full
        if self._placeholders:
            full = _Assemble.apply(self, *(placeholder for _, placeholder in self._placeholders))  # type: ignore[no-untyped-call]
        del self.full
        self._placeholders = [(index, full.new_empty(0)) for index, _ in self._placeholders]
        return full.reshape(*self._grid.lead, *full.shape[self._dim + 1 :]) if self._has_batch else full

    def _shape_error(self, output: torch.Tensor, index: int) -> NotTokenWiseError:
        return NotTokenWiseError(
            f"{self._name} has the shape {tuple(output.shape)} for {self._grid.sizes[index]} tokens: no dimension that "
            "counts tokens. Only token-wise functions can be tiled: move a reduction over tokens out of the function"
        )


class _StoreTile(torch.autograd.Function):
    """Copies a tile's output to its part of the full output, and returns a placeholder."""

    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        part.copy_(output)
        return _placeholder(output)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Assemble(torch.autograd.Function):
    """Returns the full output, connected to the placeholders of its tiles."""

    @staticmethod
    def forward(ctx: Any, output: _Output, *_placeholders: torch.Tensor) -> torch.Tensor:
        ctx.split_gradient = output.split_gradient
        return output.full

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *ctx.split_gradient(gradients[0])


class GradSlice(torch.autograd.Function):
    """A tile of an input, whose gradient is written into the input's `GradBuffer`."""

    @staticmethod
    def forward(ctx: Any, buffer: GradBuffer, index: int, tile: torch.Tensor) -> torch.Tensor:
        ctx.buffer, ctx.index = buffer, index
        return tile.view_as(tile)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, ctx.buffer.write(ctx.index, gradients[0])


class GradBuffer:
    """The gradient of one input, filled by its tiles in one backward."""

    def __init__(self, grid: TokenGrid, tensor: torch.Tensor) -> None:
        self._grid = grid
        self._shape = tensor.shape
        self._full: torch.Tensor | None = None
        self._backward = -1
        self._written: set[int] = set()

    def write(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Copy a tile's gradient to its part, and return a placeholder; with `create_graph`, the gradient itself."""
        if torch.is_grad_enabled():
            return gradient
        backward = graph_task_id()
        if self._full is None or self._backward != backward:
            self._full = gradient.new_empty(*self._grid.flat_lead, *self._shape[len(self._grid.lead) :])
            self._backward, self._written = backward, set()
        self._grid.part(self._full, index, self._grid.dim).copy_(gradient)
        self._written.add(index)
        return _placeholder(gradient)

    def take(self, gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the full gradient and let go of it; `gradients` is what arrived from the tiles."""
        full, self._full = self._full, None
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None
        if full is None:
            sizes = [
                [*present[0].shape[: self._grid.dim], size, *present[0].shape[self._grid.dim + 1 :]]
                for size in self._grid.sizes
            ]
            pairs = zip(gradients, sizes, strict=True)
            full = torch.cat([present[0].new_zeros(size) if g is None else g for g, size in pairs], self._grid.dim)
        else:
            for index in set(range(len(gradients))) - self._written:
                self._grid.part(full, index, self._grid.dim).zero_()
        return full.reshape(self._shape)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)  # not empty: anomaly detection looks for NaN
