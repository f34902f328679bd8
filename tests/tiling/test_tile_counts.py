"""What tiling costs and what it saves: counted matrix products, live bytes, copies."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide import simdevice
from lowtide.tiling.tile import TILE_BYTES, tokens_per_tile
from models.mlps import Gated, batch, build


class Block(nn.Module):
    """Llama's layer, without the attention."""

    def __init__(self, tokens=None) -> None:
        super().__init__()
        self.norm, self.mlp, self.tokens = nn.LayerNorm(16, dtype=torch.double), Gated(), tokens

    def forward(self, x):
        normed = self.norm(x)
        return x + (self.mlp(normed) if self.tokens is None else lowtide.tile(self.mlp, normed, tokens=self.tokens))


def flops(run):
    with FlopCounterMode(display=False) as counter:
        run(batch(3, 37)).sum().backward()
    return counter.get_total_flops()


def test_inside_a_checkpoint_it_costs_nothing():
    def run(block):
        return flops(lambda x: checkpoint(block, x, use_reentrant=False))

    assert run(Block(tokens=10)) == run(Block())


def test_without_a_checkpoint_it_costs_the_products_that_backward_needs_again():
    assert 9 * flops(Block(tokens=10)) == 11 * flops(Block())


def test_inside_an_applied_region_it_costs_nothing():
    def run(tokens):
        model = nn.Sequential(Block(tokens), Block(tokens))
        lowtide.apply(model, "recompute")
        return flops(model)

    assert run(10) == run(None)


def test_a_short_call_is_one_tile_in_the_report():
    model = nn.Sequential(Block(), Block())
    handle = lowtide.apply(model, "tile(mlp, tokens=10)")
    counts = []
    for tokens in (4, 10, 25):
        model(batch(1, tokens)).sum().backward()
        counts += [(tiled.calls, tiled.tiles) for tiled in handle.report().tiles]
    assert counts == [(1, 1)] * 2 + [(2, 2)] * 2 + [(3, 5)] * 2


def peak_of_backward(mlp, x, run):
    """Bytes over the model, its gradients and its input."""
    mlp.zero_grad()
    x.grad = None
    torch.accelerator.synchronize()
    base = simdevice.stats().live_bytes
    out = run(x)
    simdevice.reset()
    out.backward(torch.ones_like(out))
    torch.accelerator.synchronize()
    return simdevice.stats().peak_bytes - base - sum(p.nbytes for p in mlp.parameters())


def test_backward_holds_one_tile(sim):
    mlp = Gated(hidden=128, inner=448, dtype=torch.float32).to(sim)
    x = torch.randn(4096, 128, device=sim, requires_grad=True)
    plain = peak_of_backward(mlp, x, mlp)
    in_tiles = peak_of_backward(mlp, x, lambda x: lowtide.tile(mlp, x, tokens=4096 // 32))
    assert in_tiles <= plain / 3.5


def test_what_a_partial_backward_leaves_unused_goes_with_its_tile(sim):
    """The gradient of the last weight alone asks for one of the tensors that a tile saved."""
    mlp = Gated(hidden=128, inner=448, dtype=torch.float32).to(sim)
    x = torch.randn(4096, 128, device=sim)
    out = lowtide.tile(mlp, x, tokens=4096 // 32)
    torch.accelerator.synchronize()
    simdevice.reset()
    base = simdevice.stats().live_bytes
    torch.autograd.grad(out, mlp.down.weight, torch.ones_like(out))
    torch.accelerator.synchronize()
    one_tile = 8 * 448 * (4096 // 32) * 4
    assert simdevice.stats().peak_bytes - base <= out.nbytes + 3 * mlp.down.weight.nbytes + 2 * one_tile


def test_forward_holds_one_tile_and_saves_the_input_alone(sim):
    mlp = Gated(hidden=128, inner=448, dtype=torch.float32).to(sim)
    x = torch.randn(4096, 128, device=sim, requires_grad=True)
    torch.accelerator.synchronize()
    base = simdevice.stats().live_bytes
    out = lowtide.tile(mlp, x, tokens=128)
    torch.accelerator.synchronize()
    assert simdevice.stats().live_bytes - base == out.nbytes


class Bent(Gated):
    """Some of its operations save their own output."""

    def forward(self, x):
        return super().forward(x).relu().exp().tanh()


@pytest.mark.parametrize("kind", [Gated, Bent])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_nothing_outlives_backward(sim, needs_grad, kind):
    mlp = kind(hidden=128, inner=448, dtype=torch.float32).to(sim)
    x = torch.randn(512, 128, device=sim, requires_grad=needs_grad)
    torch.accelerator.synchronize()
    base = simdevice.stats().live_bytes
    lowtide.tile(mlp, x, tokens=64).sum().backward()
    torch.accelerator.synchronize()
    gradients = sum(p.grad.nbytes for p in mlp.parameters()) + (x.grad.nbytes if needs_grad else 0)
    assert simdevice.stats().live_bytes - base == gradients


def test_a_graph_that_dies_without_backward_frees_everything(sim):
    mlp = Gated(hidden=128, inner=448, dtype=torch.float32).to(sim)
    x = torch.randn(512, 128, device=sim, requires_grad=True)
    torch.accelerator.synchronize()
    base = simdevice.stats().live_bytes
    out = lowtide.tile(mlp, x, tokens=64)
    del out
    torch.accelerator.synchronize()
    assert simdevice.stats().live_bytes == base


def test_a_store_sees_the_input_once_and_nothing_else(sim):
    mlp = Gated(hidden=128, inner=448, dtype=torch.float32).to(sim)
    x = torch.randn(512, 128, device=sim, requires_grad=True)
    schedule = lowtide.Schedule(lowtide.HostStore())
    simdevice.reset()
    with lowtide.offload(schedule) as offloaded:
        out = lowtide.tile(mlp, x * 1, tokens=64)
        for _ in range(6):  # later tensors, so that the first ones leave
            out = out.sin()
    assert offloaded.ledger.saved_bytes == x.nbytes + 6 * out.nbytes
    out.sum().backward()
    assert x.grad is not None


def bf16_error(tiles, accumulate):
    torch.manual_seed(0)
    exact, low = Gated(64, 128, torch.double), Gated(64, 128, torch.bfloat16)
    x = torch.randn(4096, 64).bfloat16()
    low.load_state_dict(exact.state_dict())
    exact.load_state_dict(low.state_dict())
    exact(x.double()).square().sum().backward()
    lowtide.tile(low, x, tokens=4096 // tiles, accumulate=accumulate).square().sum().backward()
    expected = exact.down.weight.grad
    return ((low.down.weight.grad - expected).norm() / expected.norm()).item()


def test_sums_in_float32_keep_the_error_flat():
    errors = [bf16_error(tiles, "auto") for tiles in (4, 16, 64, 256)]
    assert max(errors) < 1.1 * min(errors)
    assert bf16_error(256, "parameter") > 1.5 * max(errors), "what it would be without"


def test_sums_beyond_the_limit_stay_in_the_weights_type(monkeypatch):
    monkeypatch.setattr("lowtide.tiling.weight_grads.FLOAT32_BYTES", 4)
    assert bf16_error(256, "auto") == bf16_error(256, "parameter")
    assert bf16_error(256, "float32") < bf16_error(256, "parameter")


def test_the_default_tile_comes_from_bytes():
    mlp = Gated(hidden=4096, inner=14336, dtype=torch.bfloat16).to("meta")
    x = torch.empty(1, 131072, 4096, dtype=torch.bfloat16, device="meta")
    assert tokens_per_tile(x, mlp) == TILE_BYTES // (2 * (2 * 14336 + 4096))
    assert 8_000 <= tokens_per_tile(x, mlp) <= 32_000
    assert tokens_per_tile(x, None) == TILE_BYTES // (2 * 8 * 4096)
    assert tokens_per_tile(x, nn.GELU()) == tokens_per_tile(x, None), "a module that does not tell its width"


def listed(*parts):
    module = nn.Module()
    module.parts = nn.ModuleList(parts)
    return module


def test_layers_in_a_list_are_no_experts():
    """diffusers' feed-forwards are such lists: as one of three experts, they would get tiles three times as large."""
    x = torch.empty(1, 75_600, 5120, dtype=torch.bfloat16, device="meta")
    with torch.device("meta"):
        projection = nn.Sequential(nn.Linear(5120, 13824), nn.GELU())
        forward = listed(projection, nn.Dropout(), nn.Linear(13824, 5120))
        layers = listed(nn.Linear(5120, 13824), nn.Linear(13824, 5120))
        experts = listed(*(nn.Sequential(nn.Linear(5120, 13824), nn.Linear(13824, 5120)) for _ in range(8)))
    one = TILE_BYTES // (2 * (13824 + 5120))
    assert [tokens_per_tile(x, module) for module in (forward, layers, experts)] == [one, one, one]
    experts.top_k = 2
    assert tokens_per_tile(x, experts) == one // 2


def test_ledger_of_the_default(monkeypatch):
    monkeypatch.setattr(sys.modules["lowtide.tiling.tile"], "TILE_BYTES", 10 * 8 * (40 + 40 + 16))
    mlp, calls = build(Gated), []
    mlp.register_forward_hook(lambda *_: calls.append(1))
    lowtide.tile(mlp, batch(3, 37))
    assert len(calls) == 12, "111 tokens in tiles of at most ten"
