"""Finds the head of a language model: the last linear layer, and the model whose `forward` takes labels."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, NamedTuple

from lowtide.errors import NoRegionError

if TYPE_CHECKING:
    from torch import nn


class Head(NamedTuple):
    """The layer that makes logits, and the model that makes a loss of them."""

    name: str
    module: nn.Module
    owner: nn.Module


def find_head(model: nn.Module) -> Head:
    """By transformers' own convention; anything else can call `lowtide.linear_cross_entropy` itself."""
    for owner_name, owner in model.named_modules():
        ask = getattr(type(owner), "get_output_embeddings", None)
        if ask is None or "labels" not in inspect.signature(type(owner).forward).parameters:
            continue
        head = ask(owner)
        for name, module in owner.named_modules():
            if module is head:
                return Head(".".join(filter(None, [owner_name, name])), head, owner)
    raise NoRegionError(
        f"tile(loss): {type(model).__name__} has no head that makes a loss of labels (transformers' "
        "get_output_embeddings and forward(labels=...)): call lowtide.linear_cross_entropy where your loss is made"
    )
