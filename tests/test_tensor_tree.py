"""Tensors out of nested arguments, and others in their place."""

from __future__ import annotations

import dataclasses

import torch

from lowtide.tensor_tree import flatten


@dataclasses.dataclass
class Reserved:
    """Refuses to be read by name, as transformers' configurations with settings by layer do."""

    heads: int
    mask: torch.Tensor | None = None

    def __getattribute__(self, name):
        if name == "heads":
            raise RuntimeError("ask a layer")
        return object.__getattribute__(self, name)


def test_an_object_that_refuses_to_be_read_is_taken_apart_all_the_same():
    mask = torch.ones(3)
    tensors, tree = flatten(((Reserved(4), Reserved(4, mask)), {}))
    assert len(tensors) == 1
    ((plain, filled), _) = tree.unflatten((torch.zeros(3),))
    assert plain.mask is None
    assert torch.equal(filled.mask, torch.zeros(3))
    assert object.__getattribute__(filled, "heads") == 4


def test_a_field_that_was_never_set():
    value = Reserved(4)
    object.__delattr__(value, "mask")
    tensors, tree = flatten((value,))
    assert tensors == []
    assert tree.unflatten(())[0] is value
