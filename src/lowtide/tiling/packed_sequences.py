"""Knows where the sequences lie that are packed into one, and hands a tile those that it sees.

transformers' flash attention is told the bounds of sequences (`cu_seq_lens_q`, `cu_seq_lens_k` and the greatest
lengths), or finds them in position ids that begin anew. Both are facts about the whole batch, of which a tile's part
says nothing. So the bounds are taken from the whole, and each tile's attention is told the sequences that its tokens
lie in: their keys, of the first one also those before the tile.
"""

from __future__ import annotations

import bisect
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide.errors import OddCallError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""The names under which transformers passes bounds through a model."""
_LONGEST = ("max_length_q", "max_length_k")


def bounds_in(options: Mapping[str, Any], length: int) -> list[int] | None:
    """Return the bounds that an attention function is told by its options; None if it is told none."""
    if any(options.get(name) is None for name in (*BOUNDS, *_LONGEST)):
        return None
    queries, keys = (options[name] for name in BOUNDS)
    if queries.is_meta or keys.is_meta:
        raise OddCallError(f"its {BOUNDS[0]} have no values")
    bounds: list[int] = queries.tolist()
    if bounds != keys.tolist() or bounds[:1] != [0] or bounds[-1] != length:
        raise OddCallError(f"its {BOUNDS[0]} and {BOUNDS[1]} are not the bounds of its tokens, for both alike")
    return list(dict.fromkeys(bounds))


def bounds_of(positions: torch.Tensor) -> list[int] | None:
    """Return the bounds of sequences by their position ids, which begin anew; None if they do not."""
    steps = positions.diff(dim=0) != 1
    if not steps.any():
        return None
    is_one_batch = positions.dim() == 2 and positions.shape[1] == 1  # noqa: PLR2004
    starts = (positions == 0).flatten().nonzero().flatten().tolist()
    if not is_one_batch or starts != [0, *(steps.flatten().nonzero().flatten() + 1).tolist()]:
        raise OddCallError("its flash attention takes position_ids that are not those of packed sequences")
    return [*starts, len(positions)]


def sample_bounds(bounds: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bounds of the first `count` tokens."""
    return torch.tensor(sorted(set(bounds.clamp(max=count).tolist())), dtype=bounds.dtype, device=bounds.device)


class SeenSequences(NamedTuple):
    """What the attention of one tile is told: the keys that it takes, and where sequences lie in them."""

    keys: slice
    queries_at: list[int]
    keys_at: list[int]

    @staticmethod
    def of(bounds: Sequence[int], start: int, end: int, *, is_causal: bool) -> SeenSequences:
        """Return the sequences that the tokens from `start` to `end` lie in."""
        first = bisect.bisect_right(bounds, start) - 1
        own = bounds[first : bisect.bisect_left(bounds, end) + 1]
        inside = [start, *own[1:-1], end]
        seen = [*own[:-1], end if is_causal else own[-1]]
        keys = slice(seen[0], seen[-1])
        return SeenSequences(keys, [at - start for at in inside], [at - keys.start for at in seen])

    def options(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments that tell an attention function."""
        both = (self.queries_at, self.keys_at)
        told = [torch.tensor(at, dtype=torch.int32, device=device) for at in both]
        longest = [max(end - start for start, end in pairwise(at)) for at in both]
        return {
            **dict(zip(BOUNDS, told, strict=True)),
            **dict(zip(_LONGEST, longest, strict=True)),
            "position_ids": None,
        }
