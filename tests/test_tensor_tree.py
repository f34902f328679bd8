"""Tensors out of nested arguments, and others in their place."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowtide.tensor_tree import COPIED_BYTES, flatten


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


DEPTH = 2000
"""Deeper than Python's stack."""


def nested(value, depth=DEPTH):
    for level in range(depth):
        value = [value] if level % 2 else (value, level)
    return value


def innermost(value):
    while isinstance(value, list | tuple):
        value = value[0]
    return value


def test_a_value_may_be_nested_deeper_than_the_stack():
    tensors, tree = flatten(nested(torch.ones(3)))
    assert len(tensors) == 1
    assert innermost(tree.unflatten((torch.zeros(3),))).sum() == 0
    plain = nested("no tensor")
    tensors, tree = flatten(plain)
    assert tensors == []
    assert tree.unflatten(()) is plain


def test_a_container_that_holds_itself_is_taken_apart_once():
    value = [torch.ones(2)]
    value.append(value)
    tensors, tree = flatten(value)
    assert len(tensors) == 1
    again = tree.unflatten((torch.zeros(2),))
    assert again[0].sum() == 0
    assert again[1] is value


def test_the_same_container_twice_is_filled_twice():
    pair = (torch.ones(1), "name")
    tensors, tree = flatten([pair, pair])
    assert len(tensors) == 1
    first, second = tree.unflatten((torch.zeros(1),))
    assert first[0] is second[0]


@pytest.mark.parametrize(
    ("value", "may_hide"),
    [
        ((torch.ones(1), None, 1, 1.0, "word", torch.float32, [{"a": (True,)}]), False),
        ((torch.ones(1), object()), True),
        ((torch.ones(1), {"a": [lambda: None]}), True),
    ],
)
def test_an_object_of_an_unknown_kind_is_noted(value, may_hide):
    assert flatten(value)[1].may_hide_tensors is may_hide


class TestCopies:
    def test_the_copy_has_the_value_of_before_and_is_never_the_same_twice(self):
        step = torch.tensor(3)
        tensors, tree = flatten(((step, {"again": step}), torch.ones(2, requires_grad=True)))
        others = tree.take_copies(tensors)
        assert len(others) == 1
        step += 1
        for _ in range(2):
            (first, rest), _ = tree.unflatten(tuple(others))
            assert first.item() == 3
            assert first is rest["again"], "one object stays one object"
            first += 5

    @pytest.mark.parametrize(
        "value",
        [
            torch.ones(4096, dtype=torch.uint8).repeat(2),
            torch.ones(2, requires_grad=True),
            torch.ones(4).view(2, 2),
            torch.ones(4)[1:],
            torch.eye(2).to_sparse(),
            torch.nn.Parameter(torch.ones(2), requires_grad=False),
        ],
        ids=["large", "needs a gradient", "view", "part", "sparse", "parameter"],
    )
    def test_what_is_no_small_state_is_left_alone(self, value):
        tensors, tree = flatten([value])
        assert tree.take_copies(tensors) == tensors
        assert tree.unflatten(tuple(tensors))[0] is value

    def test_the_limit_is_inclusive(self):
        tensors, tree = flatten([torch.ones(COPIED_BYTES, dtype=torch.uint8)])
        assert tree.take_copies(tensors) == []

    def test_a_tensor_with_attributes_is_left_alone(self):
        marked = torch.ones(2)
        marked.is_marked = True
        tensors, tree = flatten([marked])
        assert tree.take_copies(tensors) == [marked]

    def test_tensors_that_share_memory_are_left_alone(self):
        state = torch.zeros(2)
        for other in (state[:1], state.detach(), state.data, torch.nn.Parameter(state, requires_grad=False)):
            tensors, tree = flatten([state, other])
            assert tree.take_copies(tensors) == tensors
        tensors, tree = flatten([state, torch.zeros(2)])
        assert tree.take_copies(tensors, [state.detach()]) == [state], "as it does with a buffer"

    def test_a_tensor_on_a_device_is_left_alone(self, device):
        tensors, tree = flatten([torch.zeros(2, device=device)])
        assert tree.take_copies(tensors) == tensors
