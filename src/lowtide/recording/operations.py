"""The tensors of an operation. Its arguments are a flat tuple, with a list of tensors here and there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def tensors_in(things: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among `things`, and in lists and tuples among them. For every operation, so it is no pytree."""
    found: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, list | tuple):
            found += tensors_in(thing)
    return found


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return tensors_in(args) + tensors_in(kwargs.values()) if kwargs else tensors_in(args)
