"""Beside torch.compile: compiled parts inside a region, and regions inside a compiled model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from models.stacked import Block, assert_same, build, train_step

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # dynamo's own look at tensors
]


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def compile_blocks(model):
    model.layers = nn.ModuleList(torch.compile(layer, backend="aot_eager") for layer in model.layers)


def compile_forwards(model):
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")


def compile_parts(model):
    for layer in model.layers:
        layer.up.compile(backend="aot_eager")


@pytest.mark.parametrize("compile_it", [compile_blocks, compile_forwards, compile_parts])
def test_a_compiled_part_inside_a_region(compile_it):
    expected = train_step(without_dropout(build("cpu")), "cpu")
    model = without_dropout(build("cpu"))
    compile_it(model)
    applied = lowtide.apply(model, "recompute")
    assert_same(train_step(model, "cpu"), expected)
    assert [region.recomputes for region in applied.report().regions] == [1] * len(model.layers)


def test_a_region_inside_a_compiled_model():
    expected = train_step(without_dropout(build("cpu")), "cpu")
    model = without_dropout(build("cpu"))
    applied = lowtide.apply(model, "recompute")
    compiled = torch.compile(model, backend="aot_eager")
    ours = train_step(compiled, "cpu")
    assert_same(ours, expected)
    assert [region.recomputes for region in applied.report().regions] == [1] * len(model.layers)


def test_a_block_compiled_in_place_with_a_region_in_it():
    expected = train_step(without_dropout(build("cpu")), "cpu")
    model = without_dropout(build("cpu"))
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    applied = lowtide.apply(model, "recompute")
    assert_same(train_step(model, "cpu"), expected)
    assert [region.recomputes for region in applied.report().regions] == [1] * len(model.layers)


def test_checkpoint_inside_a_compiled_function():
    block = without_dropout(Block())
    x = torch.randn(8, 32, requires_grad=True)

    @torch.compile(backend="aot_eager")
    def step(x):
        return lowtide.checkpoint(block, F.gelu(x)).square().sum()

    (ours,) = torch.autograd.grad(step(x), x)
    (expected,) = torch.autograd.grad(block(F.gelu(x)).square().sum(), x)
    torch.testing.assert_close(ours, expected)
