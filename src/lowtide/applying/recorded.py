"""What transformers records inside a tiled module, such as a router's logits: one entry per call, not one per tile.

Its hooks append each output of a module to a list while a model's forward runs; a router inside a tiled mixture of
experts is called once per tile. A router's loss that masks padding needs the logits of all tokens in one piece.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from lowtide.compat import recorded_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.measure import TileLedger


@contextlib.contextmanager
def recorded_whole(lead: torch.Size, ledger: TileLedger) -> Iterator[None]:
    """Entries that the tiles of this call add are joined. `lead` are the dimensions of the call's tokens."""
    records = recorded_outputs()
    counts = {key: len(entries) for key, entries in records.items() if isinstance(entries, list)}
    tiles = ledger.tiles
    yield
    tiles = ledger.tiles - tiles
    for key, count in counts.items():
        added = records[key][count:]
        if tiles > 1 and len(added) > 1 and len(added) % tiles == 0:
            per_tile = len(added) // tiles
            records[key][count:] = [_joined(added[first::per_tile], lead) for first in range(per_tile)]


def _joined(parts: list[Any], lead: torch.Size) -> Any:
    has_batch = len(lead) > 1 and parts[0].dim() > len(lead) and parts[0].shape[0] == 1
    if not has_batch:
        return torch.cat(parts)
    whole = torch.cat(parts, dim=1)
    return whole.reshape(*lead, *whole.shape[2:])
