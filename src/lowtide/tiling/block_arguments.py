"""The arguments of a transformer block, cut along its tokens.

Which dimension of an argument counts tokens is told by its name and shape, as transformers' blocks have them: hidden
states have it second, masks and position embeddings last but one, position ids last. What belongs to another sequence
(an encoder's states) or has no row per token is the same for every tile, and so are the bounds of packed sequences. A
tensor that has as many of something else as there are tokens is cut there as well, and the trial tells whether that was
right; one that has it twice is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import OddCallError
from lowtide.tensor_tree import flatten
from lowtide.tiling.packed_sequences import BOUNDS, sample_bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lowtide.tensor_tree import TensorTree

_OTHER_SEQUENCE = ("encoder_", "key_value", "cross_")
_HIDDEN_DIMS = 3
_SQUARE_DIMS = 3


class BlockArguments:
    """The arguments of one call by name. Their tensors are taken out with tokens first; it holds none of them."""

    def __init__(self, named: Mapping[str, Any], length: int) -> None:
        self.length = length
        self.tensors: list[torch.Tensor] = []
        self._dims: list[int | None] = []
        self._trees: list[tuple[str, TensorTree, int]] = []
        for name, value in named.items():
            if "mask" in name and not isinstance(value, torch.Tensor | None):
                raise OddCallError(f"its mask is a {type(value).__name__}, which cannot be cut by rows")
            tensors, tree = flatten(value)
            self._trees.append((name, tree, len(tensors)))
            for tensor in tensors:
                dim = _token_dim(name, tensor, length)
                self._dims.append(dim)
                # A tensor for all tiles is hidden behind a first dimension of one, which counts no tokens.
                self.tensors.append(tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0))

    def take(self) -> list[torch.Tensor]:
        """Return the tensors, and let go of them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def first_token(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows of the first token."""
        pairs = zip(tensors, self._dims, strict=True)
        return [tensor.detach() if dim is None else tensor.detach()[:1] for tensor, dim in pairs]

    def position_ids(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the position ids among the tensors, with tokens first, if they have values."""
        rest = iter(tensors)
        taken = {name: [next(rest) for _ in range(count)] for name, _, count in self._trees}
        ids = [tensor for tensor in taken.get("position_ids", []) if not tensor.is_meta]
        return ids[0] if ids else None

    def filled(self, rows: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the arguments of a tile, by name, from its rows."""
        parts = iter([_in_place(row, dim) for row, dim in zip(rows, self._dims, strict=True)])
        return {name: tree.unflatten([next(parts) for _ in range(count)]) for name, tree, count in self._trees}


def _in_place(row: torch.Tensor, dim: int | None) -> torch.Tensor:
    if dim is None:
        return row[0]
    part = row.movedim(0, dim).contiguous()
    return part.view(part.shape)  # torch chooses kernels by strides, also by those of dimensions of one


def sample(named: Mapping[str, Any], length: int, count: int) -> dict[str, Any]:
    """Return copies of the arguments with the first `count` tokens alone."""
    found = {}
    for name, value in named.items():
        tensors, tree = flatten(value)
        found[name] = tree.unflatten([_first_tokens(name, tensor, length, count) for tensor in tensors])
    return found


def _first_tokens(name: str, tensor: torch.Tensor, length: int, count: int) -> torch.Tensor:
    if name in BOUNDS:
        return sample_bounds(tensor, count)
    dim = _token_dim(name, tensor, length)
    part = tensor if dim is None else tensor.narrow(dim, 0, count)
    if _is_square(name) and part.dim() >= _SQUARE_DIMS - 1 and part.shape[-1] == length:
        part = part.narrow(-1, 0, count)
    return part.detach().clone()


def hidden_states(named: Mapping[str, Any]) -> torch.Tensor | None:
    """Return a block's hidden states, its first argument; None if they are not batch, tokens, features."""
    first = next(iter(named.values()), None)
    is_hidden = isinstance(first, torch.Tensor) and first.dim() == _HIDDEN_DIMS and first.is_floating_point()
    return first if is_hidden else None


def _is_square(name: str) -> bool:
    return "mask" in name or "bias" in name


def _token_dim(name: str, tensor: torch.Tensor, length: int) -> int | None:
    """Return the dimension of a tensor that counts tokens; None if it is the same for all of them."""
    if name in BOUNDS:
        return None
    if "seq" in name and "len" in name:
        raise OddCallError(f"its argument {name} packs several sequences into one")
    if name.startswith(_OTHER_SEQUENCE) and not _is_square(name):
        return None
    if _is_square(name):
        is_cut = tensor.dim() >= _SQUARE_DIMS and tensor.shape[-2] == length
        return tensor.dim() - 2 if is_cut else None
    dim = -2 if name == "position_embeddings" else -1 if "position" in name else 1
    if tensor.dim() > max(dim, 0) and tensor.dim() >= -dim and tensor.shape[dim] == length:
        return dim % tensor.dim()
    others = [dim for dim, size in enumerate(tensor.shape) if size == length]
    if len(others) == 1:  # the trial tells whether it counts tokens
        return others[0]
    if others:
        raise OddCallError(f"it is not known how to cut its argument {name} of shape {tuple(tensor.shape)}")
    return None
