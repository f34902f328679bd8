"""An applied model lives and dies as it did before."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import LowtideError
from models import own
from models.stacked import build, train_step


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("keep_handle", [False, True])
def test_a_model_dies_with_its_last_reference(no_collector, keep_handle):
    model = build("cpu")
    handle = lowtide.apply(model, "recompute") if keep_handle else None
    lowtide.apply(model, "recompute")
    train_step(model, "cpu")
    gone = weakref.ref(model.layers[0])
    del model
    assert gone() is None
    if handle is not None:
        assert handle.regions == []
        assert handle.report().regions[0].recomputes == 1
        handle.remove()


def test_backward_after_the_models_last_name_is_gone():
    model = build("cpu")
    weights = list(model.parameters())
    lowtide.apply(model, "recompute")
    loss = model(torch.ones(4, 32)).sum()
    del model
    loss.backward()
    assert all(weight.grad is not None for weight in weights)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301  (our own bytes)
def test_a_copy_runs_its_own_parameters(twin_of):
    model = build("cpu")
    lowtide.apply(model, "recompute")
    twin = twin_of(model)
    train_step(twin, "cpu")
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301  (our own bytes)
def test_a_copy_gets_a_policy_of_its_own(twin_of):
    """What is left in it of the original's policy is not in the way, and goes with its own."""
    model, x = nn.Sequential(own.Stack()), torch.randn(64, own.WIDTH)
    lowtide.apply(model, "tile(mlp, tokens=16)")
    twin = twin_of(model)
    applied = lowtide.apply(twin, "recompute+tile(mlp, tokens=16)")
    for either in (model, twin):
        either(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    assert [tiled.tiles for tiled in applied.report().tiles] == [4, 4, 4]
    applied.remove()
    assert not any("forward" in vars(module) for module in twin.modules())


def test_data_parallel_is_refused():
    model = build("cpu")
    before = dict(model.layers[0].__dict__)
    with lowtide.apply(model, "recompute"), pytest.raises(LowtideError, match="DistributedDataParallel"):
        model.layers[0]._replicate_for_data_parallel()
    assert model.layers[0].__dict__ == before
    assert isinstance(model.layers[0]._replicate_for_data_parallel(), nn.Module)


def test_a_store_dies_with_its_last_reference(no_collector, tmp_path):
    """Its file and its threads go with it, also after calls that shared it."""
    store = lowtide.DiskStore(tmp_path, tmpfs=True)
    x = torch.randn(64, 64, requires_grad=True)
    y = x
    for _ in range(3):
        y = lowtide.checkpoint(torch.tanh, y, offload=store)
    gone = weakref.ref(store)
    del store
    assert gone() is not None, "the graph needs it"
    y.sum().backward()
    del y
    assert gone() is None
