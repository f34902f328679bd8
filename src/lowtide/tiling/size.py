"""How many tokens make a tile, if nobody says so.

The intermediates of a tile should come to about 1 GiB: large enough that every matrix product keeps an accelerator busy
(8 000 to 32 000 tokens for the usual models), and small beside what it replaces. What a token takes is estimated from
the module: the outputs of all its linear layers, and of as many experts as a token is sent to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.errors import InvalidValueError
from lowtide.units import parse_tokens

if TYPE_CHECKING:
    import torch
    from torch import nn

TILE_BYTES = 1024**3
_WIDTH_OF_A_FUNCTION = 8
"""What is assumed of a function that is no module: intermediates of eight times its input."""


def tile_count(x: torch.Tensor, module: nn.Module | None, tokens: int | str | None, shards: int | None) -> int:
    """The number of tiles for an input: given, or from the tokens of a tile, or from bytes."""
    count = x.shape[:-1].numel()
    if shards is not None:
        return max(1, min(shards, count))
    size = tokens_per_tile(x, module) if tokens in (None, "auto") else parse_tokens(tokens)
    if size < 1:
        raise InvalidValueError(f"a tile needs at least one token, got tokens={tokens!r}")
    return max(1, -(-count // size))


def tokens_per_tile(x: torch.Tensor, module: nn.Module | None) -> int:
    """The default."""
    width = _width(module) if module is not None else 0
    width = width or _WIDTH_OF_A_FUNCTION * x.shape[-1]
    return max(1, TILE_BYTES // (width * x.element_size()))


def _width(module: nn.Module) -> int:
    """Numbers that one token makes on its way through a module."""
    experts, used = 1, 1
    width = 0
    for inner in module.modules():
        used = max(used, int(getattr(inner, "top_k", 0) or 0))
        features = getattr(inner, "out_features", None)
        if isinstance(features, int):
            width += features
        for weight in inner._parameters.values():
            if weight is not None and weight.dim() == 3:  # noqa: PLR2004  (all experts in one)
                experts = max(experts, weight.shape[0])
                width += weight.shape[0] * max(weight.shape[1:])
        lists = [child for child in inner.children() if type(child).__name__ == "ModuleList"]
        experts = max([experts, *(len(child) for child in lists)])  # type: ignore[arg-type]
    return width * used // experts if experts > used else width
