"""Finds the repeated blocks of a model by its structure: what one would expect to be recomputed.

A stack is a container with at least two children of one class, each with parameters and children: a text model's
layers, the blocks of a vision tower, an encoder's stages. It is found independently of any engine, so that a stack that
an engine forgot shows.
"""

from __future__ import annotations

import collections
import dataclasses

from torch import nn

from lowtide.modules import plain_name, unwrap_checkpoint

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_FEWEST_BLOCKS = 2


@dataclasses.dataclass(frozen=True)
class Stack:
    """Blocks of one class in one container."""

    name: str
    kind: str
    """The name of the blocks' class."""
    blocks: tuple[str, ...]


def find_stacks(model: nn.Module) -> list[Stack]:
    """Return every stack, outer ones first. A container inside a block (experts, inner stages) is a stack, too."""
    return [
        Stack(plain_name(name), kind, tuple(blocks))
        for name, module in model.named_modules()
        if isinstance(module, _CONTAINERS)
        for kind, blocks in _blocks_by_class(name, module).items()
        if len(blocks) >= _FEWEST_BLOCKS
    ]


def _blocks_by_class(name: str, container: nn.Module) -> dict[str, list[str]]:
    found: dict[str, list[str]] = collections.defaultdict(list)
    for key, child in container.named_children():
        inner = unwrap_checkpoint(child)
        if next(inner.parameters(), None) is not None and next(inner.children(), None) is not None:
            found[type(inner).__name__].append(plain_name(f"{name}.{key}" if name else key))
    return found
