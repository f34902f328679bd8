"""The weights of a forward: noted, compared, put back in their places, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowtide.errors import InPlaceError
from lowtide.weights import are_as_noted, as_in_forward, replaced_weights, weights_of, without_moved


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))


def change_in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(2)


def give_other_data(model):
    model[2].weight.data = torch.zeros(4, 4)


def replace(model):
    model[2].weight = nn.Parameter(torch.zeros(4, 4))


def freeze(model):
    model[0].bias.requires_grad_(requires_grad=False)


def remove(model):
    del model[0].bias


def use(model, noted):
    with as_in_forward(noted, "a module"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("change", [change_in_place, give_other_data, replace, freeze, remove])
def test_any_change_is_seen(change):
    model = net()
    noted = weights_of(model, called=True)
    assert len(noted) == 3
    assert are_as_noted(noted)
    change(model)
    assert not are_as_noted(noted)


@pytest.mark.parametrize("change", [change_in_place, give_other_data])
def test_other_contents_are_refused(change):
    model = net()
    noted = weights_of(model, called=True)
    use(model, noted)
    change(model)
    with pytest.raises(InPlaceError, match="a module: the weight 'weight' of shape"):
        use(model, noted)


@pytest.mark.parametrize("change", [replace, freeze, remove])
def test_a_forward_finds_its_weights_and_leaves_what_is_there(change):
    model = net()
    first = dict(model.named_parameters())
    noted = weights_of(model, called=True)
    change(model)
    second = dict(model.named_parameters())
    trained = [weight.requires_grad for weight in second.values()]
    with as_in_forward(noted, "a module"):
        assert {name: id(weight) for name, weight in model.named_parameters()} == {n: id(w) for n, w in first.items()}
        assert all(weight.requires_grad for weight in model.parameters())
        assert are_as_noted(noted)
    assert {name: id(weight) for name, weight in model.named_parameters()} == {n: id(w) for n, w in second.items()}
    assert [weight.requires_grad for weight in model.parameters()] == trained


def test_what_was_in_a_place_comes_back_after_an_error():
    model = net()
    noted = weights_of(model, called=True)
    with pytest.raises(RuntimeError, match="shape"), replaced_weights(noted, [torch.zeros(4, 3)] * 3):
        model(torch.ones(2, 4))
    assert are_as_noted(noted)


def test_a_weight_whose_data_moved_in_forward_may_move_again_and_others_may_not():
    model = net()
    noted = weights_of(model, called=True)
    give_other_data(model)
    settled = without_moved(noted)
    give_other_data(model)
    use(model, settled)
    model[0].weight.data = torch.zeros(4, 4)
    with pytest.raises(InPlaceError, match="given other data"):
        use(model, settled)


def test_weights_that_stayed_in_place_are_noted_as_they_were():
    noted = weights_of(net(), called=True)
    assert without_moved(noted) is noted


def test_weights_that_fsdp2_gathers_as_a_module_is_called_are_left_to_it():
    """Called from within its hooks, the module has gathered its own already."""
    linear = nn.Linear(4, 4)
    linear.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # as fully_shard does
    assert weights_of(linear, called=True) == []
    assert [weight.name for weight in weights_of(linear, called=False)] == ["weight", "bias"]
    beside = nn.Sequential(nn.Linear(4, 4, bias=False), linear)
    assert [weight.tensor for weight in weights_of(beside, called=True)] == [beside[0].weight]
