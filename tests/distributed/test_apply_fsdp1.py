"""An applied model under FSDP1, which gathers weights behind modules' backs: the gradients of the joined batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import lowtide
from models.mlps import HIDDEN, Gated
from support.launcher import RankFailedError, run_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.double)
        self.mlp = Gated()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def batch(rank: int) -> torch.Tensor:
    return torch.randn(2, 24, HIDDEN, dtype=torch.double, generator=torch.Generator().manual_seed(rank))


def trained_weights(rank: int, policy: str, units: str, original: bool) -> dict:
    net = model()
    handle = lowtide.apply(net, policy)
    wrap = {"root": None, "layers": ModuleWrapPolicy({Layer}), "linears": ModuleWrapPolicy({nn.Linear})}[units]
    cpu = torch.device("cpu")
    sharded = FullyShardedDataParallel(net, auto_wrap_policy=wrap, use_orig_params=original, device_id=cpu)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        sharded(batch(rank)).square().mean().backward()
        optimizer.step()
    assert all(region.recomputes == region.forwards == 2 for region in handle.report().regions)
    with FullyShardedDataParallel.summon_full_params(sharded):
        named = [(name.replace("_fsdp_wrapped_module.", ""), weight) for name, weight in sharded.named_parameters()]
        return {name: weight.detach().clone().numpy() for name, weight in named}


def assert_trained_on_the_joined_batch(per_rank: list[dict]) -> None:
    reference = model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        sum(reference(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
    for weights in per_rank:
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(torch.from_numpy(weights[name]), parameter.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("original", [True, False], ids=["original parameters", "flat"])
@pytest.mark.parametrize("units", ["root", "layers", "linears"])
def test_recompute(units, original):
    assert_trained_on_the_joined_batch(run_ranks(trained_weights, "recompute", units, original))


@pytest.mark.parametrize("original", [True, False], ids=["original parameters", "flat"])
@pytest.mark.parametrize("units", ["root", "layers"])
def test_tiles_of_mlps_inside_a_unit(units, original):
    assert_trained_on_the_joined_batch(run_ranks(trained_weights, "recompute+tile(mlp,tokens=16)", units, original))


def test_units_inside_a_tiled_mlp_are_refused():
    with pytest.raises(
        RankFailedError, match=r"0\.mlp \(Gated\) cannot be tiled: FSDP1 gathers the weights of 0\.mlp\.gate"
    ):
        run_ranks(trained_weights, "recompute+tile(mlp,tokens=16)", "linears", True)
