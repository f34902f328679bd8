"""Under compiled autograd: recompute and offload are right, the guard looks, and tiles are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

import lowtide
from lowtide.applying import region_runtime
from lowtide.errors import SilentNoOpError, TransformError
from models.stacked import assert_same, build, train_step

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's own look at tensors
]


def uncompiled(graph):
    """Takes what compiled autograd made of a backward, and runs it as it is."""
    return graph


@pytest.mark.parametrize("policy", ["recompute", "offload", "recompute+offload"])
def test_gradients_are_bit_identical(device, policy):
    expected = train_step(build())
    model = build()
    applied = lowtide.apply(model, policy)
    with compiled_autograd._enable(uncompiled):
        assert_same(train_step(model), expected)
        assert_same(train_step(model), expected)
    regions = applied.report().regions
    assert [region.recomputes for region in regions] == [2 * ("recompute" in policy)] * len(regions)
    assert (sum(region.restored_bytes for region in regions) > 0) == ("offload" in policy)


@pytest.mark.slow  # the compiler looks at every hook, for half a minute
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["recompute", "offload", "recompute+offload"])
def test_gradients_are_bit_identical_behind_the_compiler(device, policy):
    expected = train_step(build())
    model = build()
    applied = lowtide.apply(model, policy)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert_same(train_step(model), expected)
        assert_same(train_step(model), expected)
    regions = applied.report().regions
    assert [region.recomputes for region in regions] == [2 * ("recompute" in policy)] * len(regions)
    assert (sum(region.restored_bytes for region in regions) > 0) == ("offload" in policy)


def test_the_guard_looks_in_the_next_forward(monkeypatch):
    """There is no callback after such a backward."""
    monkeypatch.setattr(region_runtime, "run_region", lambda forward, args, kwargs, *_, **__: forward(*args, **kwargs))
    model = build("cpu")
    lowtide.apply(model, "recompute")
    with compiled_autograd._enable(uncompiled):
        train_step(model, "cpu")
        with pytest.raises(SilentNoOpError, match=r"layers\.0.*expected a recompute"):
            model(torch.randn(4, 32))


def test_tiles_are_refused_by_name():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)))
    lowtide.apply(model, "tile(mlp, tokens=4)")
    loss = model(torch.randn(1, 16, 8)).sum()
    with (
        compiled_autograd._enable(uncompiled),
        pytest.raises(TransformError, match=r"^1 runs in tiles.*compiled"),
    ):
        loss.backward()


def test_a_tiled_function_is_refused_by_name():
    linear = nn.Linear(8, 8)
    loss = lowtide.tile(linear, torch.randn(1, 16, 8, requires_grad=True), tokens=4).square().sum()
    with compiled_autograd._enable(uncompiled), pytest.raises(TransformError, match=r"^Linear runs in tiles"):
        loss.backward()
